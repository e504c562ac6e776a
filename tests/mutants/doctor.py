"""Mistakes in llmtrain/doctor."""

TABLES = {
    "llmtrain/doctor/rank_identity.py": r"""
    seen by unit/test_doctor.py
        doctor: warns of a public network although the recipe allows it
          - if found and not parallel.allow_unencrypted else []
          + if found else []
        doctor: ranks may have different versions of torch
          - MUST_AGREE = ("llmtrain", "torch")
          + MUST_AGREE = ("llmtrain",)
        doctor: recipes are not compared
          - ([rank.recipe for rank in ranks], format_ranks)
          + ([], format_ranks)
    """,
    "llmtrain/doctor/machine.py": r"""
    seen by unit/test_doctor.py
        doctor: warns if there is room on the disk
          - if free < needed:
          + if free > needed:
        doctor: a space before an interface is a part of its name
          - set(map(str.strip, gloo.split(",")))
          + set(gloo.split(","))
        doctor: NCCL's ^ is ignored
          - name.startswith(wanted)) != excluded for name
          + name.startswith(wanted)) for name
    """,
    "llmtrain/doctor/network_speed.py": r"""
    seen by unit/test_network_speed.py
        connections: rates are measured on the first one
          - tensor.chunk(STREAMS * len(comms.groups))
          + tensor.chunk(1)
        doctor: a rate includes the round trip
          - return size, max(seconds - round_trip, seconds / 2)
          + return size, seconds
        doctor: a transfer counts although it is mostly a round trip
          - max(LONG_ENOUGH, min(ROUND_TRIPS * round_trip, LONGEST_TRANSFER * timeout_seconds))
          + LONG_ENOUGH
        doctor: an all-reduce counts although it is mostly round trips
          - max(COLLECTIVE_LONG_ENOUGH, min(covered, LONGEST_COLLECTIVE * timeout_seconds))
          + COLLECTIVE_LONG_ENOUGH
        doctor: the slowest round trip determines the clock's offset
          - skew=min(pings)[1]
          + skew=max(pings)[1]
        doctor: the faster direction of a link decides
          - return min(link.sent, link.received)
          + return max(link.sent, link.received)
    """,
    "llmtrain/doctor/network_use.py": r"""
    seen by unit/test_doctor_ranks.py
        doctor: the fastest host is predicted
          -     return by_host[slow], [warning(
          +     return by_host[fast], [warning(
        doctor: a slow host's smaller part of the work is ignored
          - node: rate / parts[rank // shards]
          + node: rate
    seen by unit/test_network_use.py
        doctor: the first delay is offered even if it hides less
          - if share > most - GAIN][:1]
          + ][:1]
        doctor: invalid recipes are offered
          -         check(changed, ranks)
          -
    """,
    "llmtrain/doctor/run_folder.py": r"""
    seen by unit/test_doctor_ranks.py
        doctor: only rank 0's host looks for the run directory
          - sharing_problem([told[leader] for leader in leaders])
          + sharing_problem([told[leader] for leader in leaders[:1]])
        doctor: a file is left in the run directory
          -                 probe.unlink(missing_ok=True)
          +                 pass
    """,
    "llmtrain/doctor/run_checks.py": r"""
    seen by unit/test_doctor_ranks.py
        doctor: all nodes pin the memory of one
          - ranks = max(Counter(nodes).values())
          + ranks = len(nodes)
        doctor: a host without an address is measured at its loopback
          - host.leader.interface == UNKNOWN and self.peers.ranks[host.leader.rank].address is None
          + False
        doctor: hosts with different numbers of ranks have no mesh to measure
          - shards="auto" if is_even else 1
          + shards="auto"
        doctor: other ranks do not wait long enough for a stuck link
          - 2 * self.timeout_seconds)
          + self.timeout_seconds)
        doctor: the report is lost if a GPU fails
          - except (UserError, RuntimeError) as error:
          + except (UserError, TrainingError) as error:
        doctor: the report is first shown after the measurement
          -         show_findings(sections, out)
          +         pass
        doctor: hosts with other versions exchange values
          - timeout_seconds, source)
          + timeout_seconds)
        doctor: a timeout's message names the recipe's key
          - .replace("run.timeout_seconds", "--timeout")
          +
        doctor: a round trip counts as the latency of one way
          - 8e-6 * rate * shards, round_trip / 2,
          + 8e-6 * rate * shards, round_trip,
        doctor: the bandwidth of one rank counts as that of its replica
          - 8e-6 * rate * shards, round_trip / 2,
          + 8e-6 * rate, round_trip / 2,
    seen by unit/test_doctor.py
        doctor: GPUs are only checked for the first process
          - World(processes - 1, processes, processes - 1, processes)
          + World(0, processes, 0, processes)
    """,
    "llmtrain/doctor/timed_connection.py": r"""
    seen by unit/test_network_speed.py
        doctor: each message of a link has the whole timeout
          - self.socket.settimeout(left)
          + self.socket.settimeout(9)
    """,
    "llmtrain/doctor/token_space.py": r"""
    seen by unit/test_doctor_tokens.py
        doctor: tokens that are already prepared need room again
          - needed[split] - there.get(split, 0)
          + needed[split]
        doctor: each text of a mixture is looked for under a tokenizer of its own
          - _find_prepared(with_tokenizer_of(prepared, section))
          + _find_prepared(section)
        doctor: a node holds the texts of all replicas
          - for rank, name in enumerate(nodes) if name == node}
          + for rank, name in enumerate(nodes)}
        doctor: the node that prepares the least determines the room
          - max(counts) *
          + min(counts) *
        doctor: a dataset that has ended lacks tokens
          - float("inf") if entry.exhausted else entry.tokens
          + entry.tokens
    """,
}
