"""How a synchronization runs beside training: each schedule puts the block_sync's pieces into an order of its own."""
