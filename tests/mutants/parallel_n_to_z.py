"""Mistakes in llmtrain/parallel, n to z."""

TABLES = {
    "llmtrain/parallel/network.py": r"""
    seen by unit/test_network.py
        network: the environment's interface is not restored
          -         if before is not None:
          -             os.environ[GLOO] = before
          -
        launch: localhost may resolve to any address
          - if any(map(is_loopback, found)):
          + if found:
    seen by unit/test_public_network.py
        network: only the low end of the port range is tried
          - range(last, last - several, -1)
          + range(first, first + several)
        network: a socket that can't listen stays open
          - if_it_fails.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
          + socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        network: the first listener stays open if the second one fails
          - [if_one_fails.enter_context(_listen_on_first(address, [*ports, 0], backlog)) for ports in ends]
          + [_listen_on_first(address, [*ports, 0], backlog) for ports in ends]
        network: the interface is that of the first peer, even without a route
          - (interface_of(address_towards(peer)) for peer in peers)
          + (interface_of(address_towards(peer)) for peer in peers[:1])
    """,
    "llmtrain/parallel/optimizers.py": r"""
    seen by distributed/test_muon.py
        muon: the head and the embedding are orthogonalized, too
          - return self.in_layer and len(self.shape) == 2
          + return len(self.shape) == 2
        muon: parameters under AdamW have Muon's learning rate
          - lr * group.get("lr_ratio", 1.0)
          + lr
    seen by distributed/test_plain_loop.py
        engine: the learning rate never changes
          -         group["lr"] = lr * group
          +         group["lr"] = group["lr"] * group
    seen by unit/test_device_numbers.py, distributed/test_bad_numbers.py
        optimizers: AdamW does not skip bad steps
          -         optimizer.found_inf = skipped.float()
          -
    """,
    "llmtrain/parallel/public_network.py": r"""
    seen by unit/test_public_network.py
        public network: IP-in-IP counts as encrypted
          -  and not interface.startswith(IP_IN_IP)
        public network: a tunnel does not count as encrypted
          -  and not is_vpn(self.interface)
        public network: ranks of one node cause a warning
          - if other.node != one.node and
          + if
        public network: two launchers on one host cause a warning
          - and other.address != one.address
          + and other is not one
    """,
    "llmtrain/parallel/rendezvous.py": r"""
    seen by unit/test_rendezvous.py
        meeting: only the rank that refuses reports the reason
          -         if rank_info.refusal:
          +         if rank_info.refusal and rank == world.rank:
        meeting: ranks on several hosts may count as one host's
          - if rank_info.local_size > there:
          + if False:
        meeting: ranks may have different recipes
          - for rank_info in told}) > 1:
          + for rank_info in told}) > world.size:
        reach: rows and columns of the mesh are swapped
          - divmod(world.rank, shards)
          + divmod(world.rank, replicas)
        reach: hosts of the same name reach each other over loopback
          - not (share_interfaces and me.host == other.host)
          + me.host != other.host
        rendezvous: ranks of all steps of a Slurm job join one run
          - else slurm_step()
          + else ""
    seen by multi_node/test_two_sites.py
        reach: hosts with the same address connect to themselves
          - elif mine.address == theirs.address and not share_interfaces:
          + elif False:
        reach: only the first port is tried
          - for port in theirs.ports:
          + for port in theirs.ports[:1]:
        reach: the error names the ports of the connecting host
          - ports {theirs.port_range} of
          + ports {mine.ports[0]} of
        reach: a rank without a route to the others does not check its own interface
          - given.with_default_route(*reachable, address)
          + given.with_default_route(*reachable)
    """,
    "llmtrain/parallel/roll_call.py": r"""
    seen by unit/test_rendezvous.py
        meeting: a fast rank uses the answers of an earlier start
          -         if has_mine and store.get(START) == name:
          +         if world.rank in answers:
        meeting: ranks that wait for rank 0 in vain do not see each other
          -     _set(store, waiting, None)
          -
    """,
    "llmtrain/parallel/shared_flag.py": r"""
    seen by end_to_end/test_interruptions.py
        shared flag: other ranks are not told
          - store.set(key, "raised")
          + raised.set()
    """,
    "llmtrain/parallel/single_device.py": r"""
    seen by distributed/test_single_device.py
        single device: the rounded weights stay those of the step before
          -         for block in self.blocks:
          -             self.parameters_changed(block)
          -         return norm
          +         return norm
        single device: a synchronization does not change the rounded weights
          -         if rounded is not None:
          -             rounded.copy_(block.flat)
          +         if rounded is not None and not self._in_forward:
          +             rounded.copy_(block.flat)
        single device: a micro-batch's gradient replaces the earlier ones
          - master.grad += gradient
          + master.grad.copy_(gradient)
    """,
    "llmtrain/parallel/sparse_format.py": r"""
    seen by distributed/test_sparse_wire.py
        sparse: the largest values are chosen by sign, not by magnitude
          - magnitudes, order = chunks.abs().topk(kept, dim=1)
          + magnitudes, order = chunks.topk(kept, dim=1)
        sparse: a shorter last chunk sends as many values as a full one
          - (1, rest, -(-self.keep * rest // CHUNK))
          + (1, rest, min(rest, self.keep))
        sparse: both magnitudes are the mean of all
          - larger = (kept + 1) // 2
          + larger = kept
        sparse: indices from 2048 on lose their highest bit
          - low | (middle & 0xF) << 8
          + low | (middle & 0x7) << 8
        sparse: magnitudes are assigned by position, not by rank
          - 2 * (rank < larger).to(torch.uint8)
          + 2 * (torch.arange(kept) < larger).to(torch.uint8)
        sparse: a decoded message replaces values instead of adding to them
          - .scatter_add_(1, indices, values)
          + .scatter_(1, indices, values)
    """,
    "llmtrain/parallel/torch_engine.py": r"""
    seen by distributed/test_engine.py, distributed/test_pairs.py
        engine: gradients are summed over replicas, not averaged
          - pending.wait().div_(self.mesh.replica_comms.size)
          + pending.wait()
        engine: the loss is divided by the tokens of one shard
          - count_positions(micro_batches) * self.mesh.shard_comms.size
          + count_positions(micro_batches)
        engine: forward hooks also run in validation and recomputation
          -             if self._in_forward:
          -                 for hook
          +             if True:
          +                 for hook
    seen by distributed/test_plain_loop.py
        engine: gradients are not clipped
          - torch.nn.utils.clip_grads_with_norm_(masters, self._clip_norm, norm)
          + pass
    seen by distributed/test_single_device.py
        engine: averages are written to the blocks in forward order
          - zip(reversed(self.masters), self._averaging, strict=True)
          + zip(self.masters, self._averaging, strict=True)
    seen by distributed/test_pairs.py
        engine: gradients are averaged in every micro-batch
          - if not (self._is_last and self.average_gradients
          + if not (self.average_gradients
    seen by emulated_gpu/test_training.py
        times: the averaging of gradients is timed on the host
          deep: an engine on a GPU needs the emulated GPU, which takes a minute to build
          - self.gradient_wait = DeviceTimer(mesh.device)
          + self.gradient_wait = DeviceTimer()
    seen by distributed/test_engine.py
        engine: replicas that average their gradients clip by norms in fp32
          - exact=averages
          + exact=False
    seen by distributed/test_initial_weights.py
        weights: torch's engines start from random weights
          - initialize(model, block, parts.seed, mesh.device, self.master_dtype, parts.read)
          + initialize(model, block, parts.seed, mesh.device, self.master_dtype)
    seen by distributed/test_zero.py
        engine: optimizer moments are not restored
          - value.copy_(local(state[f"optimizer.{name}.{key}"]))
          + pass
    seen by distributed/test_single_device.py
        engine: loaded masters do not change the rounded weights
          -         for block in self.blocks:
          -             self.parameters_changed(block)
          -
          -     def to_dtensors
          +
          +     def to_dtensors
    """,
    "llmtrain/parallel/virtual_clock.py": r"""
    seen by distributed/test_virtual_clock.py
        virtual clock: the duration of a step is rounded down
          - math.ceil((steps
          + math.floor((steps
        virtual clock: every micro-batch takes the time of a step
          - if step != self._last_step:
          + if True:
    seen by end_to_end/test_in_process.py
        virtual clock: a resumed run's first round includes the whole time before
          - self._started_at += now - self.now
          + self._started_at += 0.0
    """,
    "llmtrain/parallel/wire_format.py": r"""
    seen by unit/test_wire.py, distributed/test_comms_wire.py
        wire: values are truncated, not rounded
          - quotients.round_()
          + quotients.trunc_()
        wire: halves are rounded up, not to even
          - quotients.round_()
          + quotients.add_(0.5).floor_()
        wire: a scale may be subnormal
          - .clamp_(min=SMALLEST_SCALE)
        wire: a scale's inverse is rounded to fp32 for fp64 values, too
          - (1.0 / scales.to(groups.dtype))
          + (1.0 / scales)
        wire: int8 has 128 levels
          - _integers(groups, 127)
          + _integers(groups, 128)
    seen by unit/test_wire.py
        wire: compiled rounding divides approximately
          - , options={option: True}
        wire: values of 16 bits are rounded in 16 bits
          -     groups = groups.to(torch.promote_types(groups.dtype, torch.float32))
          -
    seen by unit/test_wire.py, unit/test_table_wires.py
        fp4: the border between two powers is their geometric mean
          - 0x3FFFFF
          + 0x4AFB0D
        fp4: a value halfway between two powers becomes the larger one
          - 0x3FFFFF
          + 0x400000
        fp4: values just below the smallest power become 0
          - _ones(magnitudes > 2.0**-7)
          + _ones(magnitudes >= 2.0**-6)
        fp4: signs are lost
          - 8 * _ones(quotients < 0)
          + 8 * _ones(quotients < -9)
        2bit: the scale is the largest magnitude
          - groups.abs().mean(-1, keepdim=True, dtype=torch.float64)
          + groups.abs().amax(-1, keepdim=True)
        2bit: the border is at the mean magnitude
          - 0.9816 / 0.79788
          + 1.0
        2bit: the third code of a byte is lost
          - quads | (quads << 6) | (quads << 12) | (quads << 18)
          + quads | (quads << 6) | (quads << 18)
    """,
    "llmtrain/parallel/world.py": r"""
    seen by unit/test_wrong_variables.py
        world: each process that mpirun starts trains alone
          -             check_is_alone(
          -                 "start
          +             str(
          +                 "start
        world: a single process started by mpirun counts as one of several
          - if size not in ("", "0", "1"):
          + if size:
    seen by unit/test_network.py
        mesh: each rank that shares a GPU may use all of its memory
          - -(-world.local_size // torch.cuda.device_count()) if may_share_gpu() else 1
          + 1
    seen by unit/test_nodes.py
        world: GPUs that CUDA can't use are counted
          - return torch.cuda.device_count() if torch.cuda.is_available() else 0
          + return torch.cuda.device_count()
    seen by unit/test_world.py
        world: two launchers on one host are one node
          - return f"{socket.gethostname()}:{number}"
          + return socket.gethostname()
        world: the ranks of a Slurm step meet on the job's first node
          - env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST")
          + env.get("SLURM_JOB_NODELIST")
        world: all steps of a Slurm job use one port
          - PORTS_BETWEEN_STEPS * step
          + step * 0
        world: DeepSpeed's variable for the number of ranks per node is ignored
          - env.get("LOCAL_SIZE") or␣
        world: each node has the tasks of the first node
          -         if node < nodes:
          -
          +         if True:
          +
    seen by unit/test_background_eval.py
        suite runs: the evaluation inherits the launcher's variables
          - if name not in RANK_NAMES and not name.startswith(RANK_PREFIXES)
          + if name not in RANK_NAMES
    seen by unit/test_wrong_variables.py
        world: a Slurm job's number may be text
          - environment_number("SLURM_JOB_ID", 0)
          + int(env.get("SLURM_JOB_ID", "0"))
    """,
    "llmtrain/parallel/wrapping.py": r"""
    seen by unit/test_compile.py
        wrapping: layers are compiled for dynamic shapes
          - compiled(forward, dynamic=lengths_vary)
          + compiled(forward)
        documents: a layer is compiled anew for each length
          - compiled(forward, dynamic=lengths_vary)
          + compiled(forward, dynamic=False)
    seen by unit/test_model.py
        checkpointing: the output of attention with dropout is kept
          - name.startswith(ATTENTION) and not _has_dropout(args, kwargs)
          + name.startswith(ATTENTION)
    """,
    "llmtrain/parallel/zero.py": r"""
    seen by distributed/test_zero.py, distributed/test_pairs.py
        zero: clips to ten times the norm
          - factor = torch.clamp(self._clip_norm / (norm + 1e-6), max=1.0)
          + factor = torch.clamp(self._clip_norm / (norm + 1e-6), max=10.0)
        zero: gradients are summed over replicas, not averaged
          - total.div_(comms.size).split
          + total.split
        zero: weights do not follow their master copies
          -         self._masters_changed = True
          -         if self.stage == 3:
          -
          +         self._masters_changed = False
          +         if self.stage == 3:
          +
        zero: padding is part of the norm
          -                     master[padding] = 0
          +                     pass
    seen by distributed/test_zero.py
        zero: a validation leaves gathered weights behind
          - self._engine.optimizer.parameter_offload.partition_all_parameters()
          + pass
    seen by distributed/test_initial_weights.py
        weights: ZeRO's masters stay rounded to bf16
          - if parts.read is not None and parallel.precision == "bf16":
          + if False:
        weights: every rank of ZeRO receives the first rank's part
          - master.copy_(group.part(full, self.mesh.shard_comms.rank))
          + master.copy_(group.part(full, 0))
    seen by distributed/test_zero.py::test_gradients_of_padded_documents_are_those_of_a_loop_over_documents
        documents: ZeRO divides by the tokens of all ranks before it averages over them
          - replica_tokens / ranks
          + replica_tokens
    """,
    "llmtrain/parallel/zero_layout.py": r"""
    seen by unit/test_zero_layout.py
        flat: the first rank's padding applies to all ranks
          - used = min(max(numel - rank * width, 0), width)
          + used = min(numel, width)
        zero: DeepSpeed waits for messages between replicas
          - parallel.zero_stage == 3 or not sends_while_training
          + True
        zero: DeepSpeed computes a norm that nobody reads
          - zero["compute_grad_norm"] = False
          + zero["compute_grad_norm"] = True
    """,
}
