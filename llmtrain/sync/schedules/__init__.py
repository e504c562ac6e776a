"""How a synchronisation runs beside training: each schedule puts the synchroniser's pieces into an order of its own."""
