"""`llmtrain doctor`: what could keep a run from working here, found before it starts.

Each module looks at one kind of thing and returns findings; `examine` asks them in order, `report` prints.
"""
