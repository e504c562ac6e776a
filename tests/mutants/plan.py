"""Mistakes in llmtrain/plan."""

TABLES = {
    "llmtrain/plan/engine_memory.py": r"""
    seen by unit/test_plan_memory.py
        memory: Muon's state is as large as AdamW's
          - "muon": 2 * part - of_muon // shards
          + "muon": 2 * part
        plan: AdamW keeps one moment
          - "adamw": 2 * part,
          + "adamw": part,
    seen by unit/test_plan_zero.py
        plan: ZeRO-1 keeps all gradients at all times
          - whole if parallel.zero_stage == 1 and accumulates else 0
          + whole if parallel.zero_stage == 1 else 0
        plan: a bucket is reduced without copies
          - reduced=copies * min(BUCKET, size.parameters),
          + reduced=0,
        plan: ZeRO-3 gathers nothing ahead
          - largest + max(second, ahead)
          + largest + second
        plan: ZeRO-2 has no gradients before its last bucket
          - already_there = gathers or (parallel.zero_stage == 2 and (accumulates or compute < master))
          + already_there = gathers
    """,
    "llmtrain/plan/hardware.py": r"""
    seen by unit/test_plan_show.py
        show: a GPU reaches its peak FLOPS
          - HardwareRates(GPU_EFFICIENCY * card.peak_flops, mbit, latency_ms)
          + HardwareRates(card.peak_flops, mbit, latency_ms)
    """,
    "llmtrain/plan/memory.py": r"""
    seen by unit/test_plan_memory.py
        plan: validation copies nothing to CPU memory
          - in_turns * shard_of_all if validates_others else 0
          + 0
        plan: compiled layers keep as many activations as others
          - SAVED_PER_COMPILED_LINEAR.get(size.attention, per_linear)
          + per_linear
        plan: logits in bf16 take no memory beside those in fp32
          - rounded = 0 if compute == wide else compute
          + rounded = 0
        plan: parameters stay gathered regardless of their size
          - return compute * size.parameters > max(KEPT_BYTES, KEPT_SHARE * lowest.device_total)
          + return False
        plan: small parameters are freed after forward, too
          - max(KEPT_BYTES, KEPT_SHARE * lowest.device_total)
          + KEPT_SHARE * lowest.device_total
        plan: masks of documents take no memory
          - + size.masks * mask
          + + 0 * mask
        plan: unpacked documents have masks, too
          - recipe.train.document_mask and recipe.data.packing == "packed" and
          + recipe.train.document_mask and
        plan: pinned memory is not rounded up
          - (1 << (block - 1).bit_length()) - block
          + 0 * block
        plan: a power of two is rounded up to the next one
          - (1 << (block - 1).bit_length())
          + (1 << block.bit_length())
        plan: momentum is not counted among anchors
          - 1 + len(sync.outer.state)
          + 1
    seen by unit/test_plan_zero.py
        plan: a bucket is reduced after backward only
          - own.gathered + (own.reduced if size.parameters > BUCKET else 0)
          + own.gathered
    seen by unit/test_plan_memory.py, unit/test_doctor_ranks.py
        doctor: checkpoints in the foreground are advised under ZeRO
          - recipe.checkpoint.background and recipe.parallel.engine != "zero"
          + recipe.checkpoint.background
        plan: without GPUs, the copy for a checkpoint takes no memory
          - return self.host_checkpoint + max(
          + return max(
        plan: a checkpoint in the background copies nothing
          - self.pinned_total + self.host_models + self.host_checkpoint
          + self.pinned_total + self.host_models
    seen by unit/test_doctor.py
        plan: exports of evaluations take no room on the disk
          - + exports * EXPORTED * size.parameters
          -
    seen by unit/test_in_process_recipes.py
        in process: the weights are those of one replica
          - weights=in_turns * own.weights
          + weights=own.weights
    seen by unit/test_plan_messages.py
        plan: a message in flight that keeps its errors has no bytes to send
          - return during, master * values + errors, int(encoded * values)
          + return during, master * values + errors, 0
    """,
    "llmtrain/plan/mesh_plan.py": r"""
    seen by unit/test_world.py
        plan: a replica may have a part of a node and other nodes
          -         _check_parts(shards, nodes)
          +         pass
        plan: a tight fit is sharded over one node, not over all
          - return world, f"{count} nodes
          + return per_node, f"{count} nodes
        plan: the number of replicas is taken for the number of shards
          - return world // replicas, f"{counted(world
          + return replicas, f"{counted(world
    seen by unit/test_plan_fit.py
        plan: the device with the most memory decides
          - size, least = size_or_assumed(recipe), min(memory)
          + size, least = size_or_assumed(recipe), max(memory)
        plan: an automatic mesh may fill all of a device's memory
          - <= MEMORY_HEADROOM * least
          + <= least
    """,
    "llmtrain/plan/model_size.py": r"""
    seen by unit/test_plan_show.py
        size: the cache ignores the length of sequences
          - recipe.parallel.loss_chunk, recipe.train.sequence_length
          -     if key
          + recipe.parallel.loss_chunk, 0
          +     if key
    seen by unit/test_plan_activations.py
        plan: GPT-Neo's local layers have masks of the whole sequence
          - config.attention_layers.count("local") if is_local else 0
          + 0
        plan: a window as long as the sequence is local
          - is_local = config.window_size < sequence_length
          + is_local = config.window_size <= sequence_length
    """,
    "llmtrain/plan/network_time.py": r"""
    seen by unit/test_network_time.py
        moments: the estimate has no wait for them
          - exposed += sequence_seconds(of_moments, link) / due
          + pass
        time: gradients after backward are all sent at once
          -     if not backward_share:
          +     if False:
        prediction: latency counts for one way only
          - return 2 * self.latency_seconds
          + return self.latency_seconds
        prediction: there is no slow start
          - return self.round_trip * min(doublings, pause // (self.round_trip + TIMEOUT_SECONDS))
          + return 0.0
        prediction: parallel messages do not share the bandwidth
          - return max(_least_seconds(sum(exchange.sent for exchange in exchanges), first, link), *streams)
          + return max(streams)
        prediction: a delayed mean's second exchange is hidden
          - return max(0.0, first - hidden) + second
          + return max(0.0, first - hidden)
        prediction: fragments have more time than their round
          - exposed = max(exposed, sequence_seconds(messages, link) - compute)
          + pass
        network time: several connections carry as many messages as one
          - return STREAMS * link.connections if self.is_ring else math.inf
          + return STREAMS if self.is_ring else math.inf
        network time: a group's connection is idle for one step only
          - turns * step_seconds + (turns - 1) * exposed
          + step_seconds
        network time: receivers of a first exchange are ready beforehand
          - return link.latency_seconds * (1 if self.receivers_ready else 2)
          + return link.latency_seconds
        network time: slow start assumes a fixed number of parallel messages
          - exchanges[0].is_ring else started]
          + exchanges[0].is_ring else PREFETCH + 1]
        network time: a backward pass never hides a slow start
          - if after < (connections if first[0].is_ring else 1):
          + if True:
        prediction: the largest values are summed and sent once more
          - return BlockMessage(Exchange(others * sparse.size(values, value_bytes), 1, peers=others, is_ring=False))
          + return BlockMessage(*[Exchange(others * sparse.size(values, value_bytes), 1, peers=others, is_ring=False)] * 2)
        plan: the largest values are sent to one replica
          - Exchange(others * sparse.size(
          + Exchange(sparse.size(
        plan: an all-reduce sends everything twice
          - Exchange(2 * others * chunk, hops
          + Exchange(2 * replicas * chunk, hops
        plan: the wait for messages is no part of a round's seconds
          - (period.every - found.exposed) / step_seconds
          + period.every / step_seconds
    """,
    "llmtrain/plan/recipe_warnings.py": r"""
    seen by unit/test_auto_outer.py
        warnings: timed rounds are not counted
          - rounds = 0 if seconds is None else round(local_steps(recipe) * seconds / period.every)
          + rounds = 0
    seen by unit/test_recipe_warnings.py
        warnings: validation text within the training text is accepted
          - if _is_in(text, section.source) and not is_left_out:
          + if False:
        warnings: no warning about a timed round with more steps than the run
          - period.min_steps > local * mesh.replicas
          + False
        warnings: text python is not known to contain the standard library
          - if {STDLIB, PYTHON} <= keys.keys():
          + if False:
        warnings: a validation file matched by the training pattern is accepted
          - if places == [None]:
          + if False:
        warnings: synchronous steps count as local ones
          - period, local = recipe.sync.period, local_steps(recipe)
          + period, local = recipe.sync.period, recipe.train.total_steps
    seen by unit/test_preflight.py
        warnings: no warning about a single replica, which averages with nobody
          - if mesh.replicas == 1 and not
          + if False and not
        warnings: a method for one replica gets the warning about a single replica, too
          - is_for_one_replica(recipe.sync.method) or
    seen by unit/test_auto_outer.py
        warnings: momentum with a warm-up is warned of, too
          -  and not outer.rounds.momentum_warmup
        warnings: momentum with one replica is warned of, too
          -  and recipe.parallel.replicas != 1
        warnings: rounds are counted in synchronous steps, too
          - rounds = round_count(recipe) if period.min_length else 0
          + rounds = recipe.train.total_steps // period.min_length if period.min_length else 0
          +
    """,
    "llmtrain/plan/show.py": r"""
    seen by unit/test_plan_show.py
        show: offloaded memory is not counted on a CPU
          - memory.total(hardware.on_gpu)
          + memory.device_total
        show: the time between checkpoints lacks the steps' waits
          - format_duration(steps * (one.step + one.waiting))
          + format_duration(steps * one.step)
        show: a checkpoint's period may exceed the run
          - steps = min(every or total, total)
          + steps = every or total
    seen by unit/test_plan_methods.py
        show: one replica alone has the devices of all replicas
          - alone = [estimate_time(recipe, size, 1, shards, hardware.rates) for _, shards in meshes]
          + alone = [estimate_time(recipe, size, *mesh, hardware.rates) for mesh in meshes]
        show: ranks that share a CPU would be no faster alone
          - and not (hardware.is_this_cpu or recipe.parallel.in_process)
          + and not recipe.parallel.in_process
    """,
    "llmtrain/plan/time_estimate.py": r"""
    seen by unit/test_plan_methods.py
        plan: every micro-batch hides gradients
          - else (1 - FORWARD_SHARE) / micro_batches
          + else 1 - FORWARD_SHARE
        plan: every micro-batch hides messages of layers
          - else FORWARD_SHARE / micro_batches
          + else FORWARD_SHARE
    seen by unit/test_plan_show.py
        moments: the estimate lacks their bytes
          - + moment_bytes(recipe, size, replicas)
          -     members
          +
          +     members
        time: Muon's matrix products take no time
          - step += in_turns * _muon_flops(recipe, size) / (shards * rates.flops)
          + step += 0 * _muon_flops(recipe, size)
        plan: the rate is measured with a matrix of ones
          - matrix = torch.randn(size, size, generator=draw, device=device,
          + matrix = torch.ones(size, size, device=device,
        time estimate: far replicas have one connection
          - connections = connections_for(2 * latency)
          + connections = 1
        plan: the bytes of a round ignore the wire
          - block_message(values, replicas, wire, value_bytes=master)
          + block_message(values, replicas, WireSection(), value_bytes=master)
        plan: bytes are taken for bits
          - return 8 * sent /
          + return sent /
        plan: recomputing activations costs nothing
          - again = 4 / 3 if
          + again = 1.0 if
        plan: pulls compute as long as other steps
          - average_step = step * (1 - pull_share(recipe))
          + average_step = step
    seen by unit/test_world.py
        time estimate: ranks that share a GPU are as fast as ranks with one each
          - sharing = ranks_per_device(World(0, processes, 0, processes))
          + sharing = 1.0
    """,
    "llmtrain/plan/unused_keys.py": r"""
    seen by unit/test_preflight.py
        warnings: every key in a run's own recipe counts as chosen
          - return value_of(recipe, key) != default
          + return name in value_of(recipe, path).model_fields_set
    seen by unit/test_recipe_warnings.py
        warnings: a key counts as unused if one text of a list has another value
          - if texts and all(
          + if texts and any(
        warnings: no warning that split has no effect on local files
          - not any(text.source.startswith(HUB) for text in recipe.data.texts().values())
          + False
        warnings: unused keys of wsd have no warning
          - schedule.kind != "wsd"
          + False
        warnings: unused defaults are named
          - if is_given(recipe, key):
          + if True:
    """,
}
