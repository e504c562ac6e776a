"""Mistakes in llmtrain/parallel, a to m."""

TABLES = {
    "llmtrain/parallel/collectives.py": r"""
    seen by distributed/test_moments.py
        collectives: no further collective starts when one ends
          -         in_flight.extend(islice(started, 1))
          -
    seen by unit/test_wire.py, distributed/test_comms_wire.py
        comms: the rounding error has the wrong sign
          - message.sub_(wire.decode(encoded, message.dtype)) if keeps_error
          + message.sub_(wire.decode(encoded, message.dtype)).neg_() if keeps_error
        comms: the second rounding is not in the error
          - self._error[self._comms.rank] += (total - self._wire.decode(encoded, total.dtype)).view(-1)
          + self._error[self._comms.rank] += 0.0
    seen by distributed/test_exchanges.py
        wire: the second exchange is opened only when it begins
          -         self._work = self._second.send_to_all(
          +         self._second = self._comms.open_exchange(self._what, self._second.received.shape[1])
          +         self._work = self._second.send_to_all(
    seen by distributed/test_comms_wire.py
        wire: a rounded message in flight keeps its unrounded values
          - tensor.new_empty(0))
          -         self._wire, self._shape = wire, tensor.shape
          -         chunk
          + tensor)
          +         self._wire, self._shape = wire, tensor.shape
          +         chunk
    seen by distributed/test_connections.py
        connections: the last part of a large message is not waited for
          - for part in self._parts:
          -             part.wait()
          + for part in self._parts[:-1]:
          +             part.wait()
    seen by distributed/test_sparse_wire.py
        sparse: the error of a message is 0
          - None if error is None else error.view(-1)
          -
          + None if error is None else torch.zeros_like(error).view(-1)
          +
    """,
    "llmtrain/parallel/comms.py": r"""
    seen by SCENARIOS
        comms: the bytes of an all-reduce lack the factor (N-1)/N
          - sent = 2 * (self.size - 1) / self.size * tensor.numel() * tensor.element_size()
          + sent = 2 * tensor.numel() * tensor.element_size()
    seen by distributed/test_threads.py
        comms: a lost gloo peer counts as a defect
          - isinstance(error, dist.DistError) or "gloo" in str(error)
          + isinstance(error, dist.DistError)
    seen by distributed/test_exchanges.py
        wire: rounded sums over gloo use collectives
          - return PeerExchange(self, what, part_bytes) if self.is_gloo else
          + return
    seen by unit/test_device_time.py
        times: messages are timed on the sending device
          - self.traffic = Traffic(self.training_device)
          + self.traffic = Traffic(self.device)
        times: a message over NCCL ends when it is enqueued
          - return trace.message(what, sent, self.device.type == "cuda")
          + return trace.message(what, sent)
        times: a message over gloo begins when the stream reaches it
          - return trace.message(what, sent, self.device.type == "cuda")
          + return trace.message(what, sent, self.training_device.type == "cuda")
    seen by unit/test_comms.py
        comms: a lack of memory in NCCL counts as a lost peer
          -  and not is_own_fault(error)
    seen by distributed/test_connections.py
        connections: all collectives use the first connection
          - group=self.groups[number], async_op=True
          + group=self.group, async_op=True
        connections: every exchange uses the connection with the fewest messages
          - number = self._least_used() if collective is dist.all_reduce else 0
          + number = self._least_used()
        connections: a large message uses one connection
          - if len(self.groups) > 1 and tensor.nbytes > self.size * HOP_BYTES:
          + if False:
        connections: an arrived message counts as in flight
          - works[:] = (other for other in works if other is not work)
          + pass
    """,
    "llmtrain/parallel/connections.py": r"""
    seen by distributed/test_connections.py
        connections: the shortest round trip of all ranks decides
          - "comparing round trips").max()
          + "comparing round trips").min()
    """,
    "llmtrain/parallel/device_time.py": r"""
    seen by unit/test_device_time.py
        times: the host's clock is used on a GPU
          - self._on_gpu = device is not None and device.type == "cuda"
          + self._on_gpu = False
        times: the host waits for the end of each section
          -         if len(self._pending) > MAX_PENDING:
          -
          +         if self._pending:
          +
        times: the number of unread events has no limit
          -             self._pending[0][1].synchronize()
          +             pass
        times: events are not reused
          -             self._spare += start, end
          -
        times: sections before a checkpoint was loaded are counted
          -         self._pending.clear()
          -
        times: the origin of a timeline is recorded on the training stream
          - origin.record(torch.cuda.Stream())
          + origin.record()
    """,
    "llmtrain/parallel/engine.py": r"""
    seen by distributed/test_plain_loop.py, distributed/test_engine.py
        engine: the gradient norm is that of the local shard
          - return shard.all_reduce(squared, "summing gradient norms").sqrt().to(wide)
          + return torch.stack(norms).norm().to(wide)
    seen by distributed/test_engine.py
        engine: bf16 gradients have a norm in bf16
          - elif gradients[0].dtype == wide:
          + elif True:
    """,
    "llmtrain/parallel/exchanges.py": r"""
    seen by unit/test_wire.py, distributed/test_comms_wire.py
        comms: the bytes of the first exchange include the rank's own part
          - sent = (self._comms.size - 1) * parts.shape[1]
          + sent = self._comms.size * parts.shape[1]
    seen by distributed/test_exchanges.py
        wire: the arrival of a traced message is not recorded
          -             self._wait_for_all()
          -             on_arrival()
          -
          +             self._wait_for_all()
          +
    seen by distributed/test_sparse_wire.py
        gather: the bytes are those for one receiver
          - sent = (self._comms.size - 1) * len(part)
          + sent = len(part)
    """,
    "llmtrain/parallel/fsdp.py": r"""
    seen by distributed/test_engine.py, distributed/test_pairs.py
        fsdp: gathered parameters remain after a change of the shards
          - unit.reshard()  # parameters gathered before the change are stale
          + pass
    seen by distributed/test_engine.py
        fsdp: the head stays gathered after a validation
          - unit.reshard()  # the head is still gathered, because no backward pass followed
          + pass
        fsdp: gradients accumulate over steps
          - parameter.grad = None  # FSDP would add the next step's to it
          + pass
        fsdp: layers are always resharded after forward
          - reshards = self._reshard_after_forward and not has_head
          + reshards = not has_head
    """,
    "llmtrain/parallel/in_process.py": r"""
    seen by distributed/test_in_process.py
        in process: only the first replica receives a sum
          - part.copy_(total)
          + part.copy_(part)
        in process: chunks go to the wrong replica
          - sent.chunk(len(parts))[rank]
          + sent.chunk(len(parts))[-1 - rank]
        in process: replicas may begin different collectives
          - if call.signature != signature:
          + if not call.signature:
        in process: a message is counted twice
          - self.traffic.bytes += sent
          + self.traffic.bytes += 2 * sent
    seen by distributed/test_virtual_clock.py
        in process: validation takes virtual time
          - other.clock = None
          + other.clock = self.clock
        in process: a message arrives at the time of the earliest sender
          - call.time = max(call.time, time)
          + call.time = min(call.time or time, time)
    """,
    "llmtrain/parallel/mesh.py": r"""
    seen by unit/test_mirror.py, distributed/test_mirror.py
        mesh: only the main rank raises a UserError
          - if isinstance(answer, UserError | TrainingError):
          + if self.is_main and isinstance(answer, UserError | TrainingError):
    seen by unit/test_network.py
        mesh: replicas that share a GPU send over NCCL
          -     return "gloo"
          -
          +     return replica_backend
          +
        mesh: two NCCL communicators on a GPU have no fixed order
          - if replicas_use_nccl and shards > 1:
          + if False:
        mesh: each rank chooses the backend by its own host's GPUs
          - if max(rank_info.ranks_per_gpu for rank_info in ranks) == 1:
          + if ranks[0].ranks_per_gpu == 1:
    seen by multi_node/test_two_sites.py
        run: no warning about a public network
          -                 unencrypted=unencrypted,
          -
    seen by distributed/test_connections.py
        connections: a mesh has only the first one
          - mesh.replica_comms.add_groups(more)
          + pass
    """,
    "llmtrain/parallel/muon.py": r"""
    seen by distributed/test_muon.py
        muon: the plain momentum is orthogonalized
          - direction = gradient.lerp(momentum, self._section.momentum)
          + direction = momentum.clone()
        muon: wide matrices take larger steps, not tall ones
          - math.sqrt(max(1.0, rows / columns))
          + math.sqrt(max(1.0, columns / rows))
        muon: weight decay does not scale with the learning rate
          - matrix.rows.mul_(1 - lr * group["weight_decay"])
          + matrix.rows.mul_(1 - LEAST_NORM * group["weight_decay"])
        muon: the last ranks have no rows
          - each = -(-rows // size)
          + each = max(1, rows // size)
        muon: a matrix of zeros becomes NaN
          - matrix.div_(torch.linalg.vector_norm(matrix).clamp(min=LEAST_NORM))
          + matrix.div_(torch.linalg.vector_norm(matrix))
        muon: iterations are in the parameters' precision
          - return direction.to(PRECISION[("bf16" if direction.is_cuda else "fp32") if chosen == "auto" else chosen])
          + return direction
    """,
}
