"""Mistakes in llmtrain/data, a to o."""

TABLES = {
    "llmtrain/data/background.py": r"""
    seen by unit/test_data_background.py
        stream: a tokenizer that refuses its text is restarted too often
          - if failures >= ATTEMPTS and code == BAD_USAGE:
          + if failures >= 20 * ATTEMPTS and code == BAD_USAGE:
        stream: a hub that does not answer ends a run that still has text
          - if failures >= ATTEMPTS and code == BAD_USAGE:
          -                 self._give_up(f"{error} (attempt {failures} without new text)", is_temporary=False)
          + if failures >= ATTEMPTS:
          +                 self._give_up(f"{error} (attempt {failures} without new text)", is_temporary=code != BAD_USAGE)
        stream: waits for a failing tokenizer have no timeout
          - time.monotonic() - last_progress > self._timeout
          + False
        stream: the tokenizer outlives the run
          -     threading.Thread(target=_watch_input, daemon=True).start()
          -
    """,
    "llmtrain/data/batch_shape.py": r"""
    seen by unit/test_data_loader.py
        loader: all shards of a replica read the same samples
          - return self.part.start + self.shard_rank * self.per_rank
          + return self.part.start
    seen by unit/test_batch_shares.py
        shares: all replicas have equal parts of a batch
          - shares = self.shares or (1,) * self.replicas
          + shares = (1,) * self.replicas
        shares: a checkpoint does not contain the replica's part
          - return {"part": [self.part.start, self.part.stop, self.global_batch]} if self.shares else {}
          + return {}
        shares: a run with other parts continues as if they were the same
          - return [state.get("part") for state in states] == [state.get("part") for state in mine]
          + return len(states) == len(mine)
        shares: a batch only has to suit the first replica's part
          - return lcm(*(divisor // gcd(divisor, share) for share in shares))
          + return divisor // gcd(divisor, shares[0])
    """,
    "llmtrain/data/bytes_read.py": r"""
    seen by unit/test_data_progress.py
        progress: the bytes read start at 0 with each file
          - self._before, self.current = self._before + size, int
          + self.current = int
    """,
    "llmtrain/data/checksum_scan.py": r"""
    seen by unit/test_data_damage.py
        damage: every rank reads every shard
          - self._shards = shards[share::of]
          + self._shards = shards[:]
        data: a shard that temporarily can't be read counts as damaged
          -     except FileNotFoundError as error:
          -         problem
          +     except OSError as error:
          +         problem
    """,
    "llmtrain/data/dataset.py": r"""
    seen by unit/test_data_prepare.py, unit/test_data_loader.py
        shards: a window at the end of a shard begins in the wrong shard
          - side="right"
          + side="left"
    seen by unit/test_data_prepare.py, unit/test_data_damage.py
        shards: the checksum covers only the last part
          - self._crc32 = zlib.crc32(raw, self._crc32)
          + self._crc32 = zlib.crc32(raw)
    seen by unit/test_data_dataset.py
        prepare: an incomplete shard stays on a full disk
          -             with suppress(OSError):
          -                 os.unlink(self._file.name)
          -
        index: a shard that is too long is accepted
          - (size := path.stat().st_size) != shard.bytes
          + (size := path.stat().st_size) < shard.bytes
        index: tokens per byte are returned as bytes per token
          - self.index.splits[split].text_bytes / self.index.splits[split].tokens
          + self.index.splits[split].tokens / self.index.splits[split].text_bytes
    seen by unit/test_data_stream.py
        stream: all shards are opened at once
          - [LazyShard(self.directory, shard) for shard in self.index.splits[split].shards]
          + [open_shard(self.directory, shard) for shard in self.index.splits[split].shards]
        stream: shards of a text stay open
          - array = open_shard(self._directory, self._shard)
          + array = self._array = open_shard.__wrapped__(self._directory, self._shard)
    seen by unit/test_wrong_files.py
        tokens: an index without a split is accepted
          -     if missing := [split for split in SPLITS if split not in index.splits]:
          -
          +     if missing := []:
          +
    """,
    "llmtrain/data/document_loader.py": r"""
    seen by unit/test_data_documents.py
        documents: units are in the order of their lengths
          - units[draw.permutation(len(units))]
          + units
        documents: a window includes a batch that mixes epochs
          - -(-part.start // batch) * batch
          + part.start // batch * batch
        documents: a resumed run has units of its new micro-batch
          - self._set_order(sizes, state["unit"])
          + self._set_order(sizes, self.micro_batch)
        documents: a replica divides by its own number of tokens
          - self._samples(0, self.global_batch)
          + self._samples(self.shape.first, self.shape.per_rank)
    """,
    "llmtrain/data/documents.py": r"""
    seen by unit/test_data_documents.py
        documents: the tail of a long document is lost
          - samples = -(-(ends - starts) // sequence_length)
          + samples = np.maximum((ends - starts) // sequence_length, 1)
        documents: a last document without eos is lost
          -         if start < len(tokens):
          -
          +         if False:
          +
        documents: the starts for fewer tokens are accepted
          -         and starts[-1] == len(tokens)
          -
        documents: a later part begins without the token before it
          - self.tokens.window(start - 1, end - start + 1)
          + np.concatenate([[self._eos_id], self.tokens.window(start, end - start)])
        documents: a limit does not shorten the last sample
          - np.minimum(self._starts[samples + 1], self._end)
          + self._starts[samples + 1]
        documents: a sample that ends at the limit is left out
          - side="right")) - 1, first)
          + side="left")), first)
    """,
    "llmtrain/data/extend.py": r"""
    seen by unit/test_data_prepare.py
        prepare: an interruption loses tokenized text
          -             except BaseException:
          -                 self._commit()
          -                 raise
          +             except BaseException:
          +                 raise
        prepare: text that a split has read already counts for it again
          - if split in starts and stream.documents > starts[split]:
          + if split in starts:
        prepare: a split's position goes back to that of the other split
          - if position.documents >= entry.position.documents:
          + if True:
        stream: the rate is a mean over all time
          - self._marks.popleft()
          + break
        prepare: progress with complete files expects a number of tokens
          -         remaining = sys.maxsize
          -
          +         pass
          +
    seen by unit/test_data_prepare.py, unit/test_data_damage.py
        prepare: the index is written before its shards
          - if self._writing is not None:
          -             self._writing.result()
          -         for split
          + for split
    seen by unit/test_data_tokenizing.py
        num_proc: a split gets more tokens than with one process
          - parts = {split: part for split, part in tokenized.items() if split in missing}
          + parts = tokenized
    seen by unit/test_data_progress.py
        progress: skipped text counts in the rate
          - self._marks.append((self._shown, self.tokens, bytes_read))
          + self._marks.append((self._shown, self.tokens, 0))
        progress: tokenizing for validation tokens alone has no line of its own
          - if reads_both and [*missing] == ["validation"]:
          + if False:
    seen by unit/test_data_stream.py
        stream: a complete block is not committed at once
          - if self.is_commit_due or self._completes_block():
          + if self.is_commit_due:
        stream: an interruption can damage a commit
          - self._pool.submit(self._complete).result()
          + self._complete()
    """,
    "llmtrain/data/host_blocks.py": r"""
    seen by distributed/test_train_text.py
        stream: hosts do not compare their new tokens
          - if post["digest"] != posts[0]["digest"]:
          + if False:
        stream: every host tokenizes, even if they share a folder
          - yield is_first and next(seen, mesh.world.rank) == mesh.world.rank
          + yield is_first
        stream: one host tokenizes for all, even if the others do not see its folder
          - name is not None and os.path.exists(folder / name))
          + name is not None)
        stream: a host's error does not reach other hosts
          - {} if failed is None else {
          + {} if True else {
        stream: a host does not wait for the blocks of other hosts
          - for start in starts for host in self._hosts]
          + for start in starts for host in self._hosts if self._store.check([f"text/{host}/{start}"])]
    seen by unit/test_data_stream.py
        stream: the time of comparing many blocks counts as the disk's
          -                 tokens.count_as_waiting()
          +                 pass
        stream: hosts compare only the last block that is needed
          - starts, end = [], self._agreed
          + starts, end = [], last
        stream: hosts ask for the blocks one by one
          - BLOCKS_PER_REQUEST = 256
          + BLOCKS_PER_REQUEST = 1
        stream: another host's temporary error counts as permanent
          - failed.get("is_temporary", False)
          + False
    """,
    "llmtrain/data/hub.py": r"""
    seen by unit/test_data_prepare.py
        prepare: a hub dataset is continued in its newest commit
          - self.revision = revision or newest
          + self.revision = newest
    seen by unit/test_data_sources.py
        hub: the advice after a broken connection is to download all splits
          - f"the files of its split {split} alone and give their folder as {key}"
          + "it and give the folder as data.source"
    """,
    "llmtrain/data/loader.py": r"""
    seen by distributed/test_reshard.py
        reshape: no replica reads the samples that slow replicas left
          - if not change.replicas_changed and change.old_global_batch is None and self.shape.has_parts_of(states):
          + if True:
    seen by unit/test_data_loader.py
        reshape: with another batch, each replica continues from its own position
          - if not change.replicas_changed and change.old_global_batch is None and
          + if not change.replicas_changed and
        reshape: cursors are merged by the new global batch
          - self._merge(states, change.old_global_batch or self.global_batch)
          + self._merge(states, self.global_batch)
        loader: there is one window too many
          - return max(self.tokens.max_tokens - 1, 0) // self.sequence_length
          + return self.tokens.max_tokens // self.sequence_length
        loader: all ranks validate on the same windows
          - range(first + rank, min(first + per_batch, windows), world)
          + range(first, min(first + micro_batch, windows))
        loader: labels are the inputs
          - inputs[row], labels[row] = ids[:-1], ids[1:]
          + inputs[row], labels[row] = ids[:-1], ids[:-1]
        ahead: the state is that of the batch read ahead
          -         return self._state
          +         __import__("time").sleep(0.05)
          +         return self.loader.state_dict()
        ahead: a batch read before a restore is returned after it
          -         if self._is_reading:
          -             self._receive()
          -         self.loader.load_state_dict(state)
          +         self.loader.load_state_dict(state)
    seen by unit/test_data_blocks.py
        blocks: each rank waits only for its own samples
          - self.order.wait_for(max(part[-1] for part in self.cursor.peek(0, self.global_batch)))
          + pass
        blocks: a window is read before its last token is there
          - self.tokens.wait_for(samples * self.sequence_length + 1)
          + self.tokens.wait_for(samples * self.sequence_length)
        stream: waiting for text counts as waiting for the disk
          - if not self.loader.tokens.is_waiting(seconds):
          + if True:
    seen by unit/test_data_stream.py
        stream: all windows of a batch are open at once
          - row[:] = self.tokens.window(sample * length, length + 1)
          + self._windows = [*vars(self).get("_windows", ()), self.tokens.window(sample * length, length + 1)]
          +             row[:] = self._windows[-1]
    """,
    "llmtrain/data/local_files.py": r"""
    seen by unit/test_data_ready_made.py, unit/test_data_sources.py
        token files: files of the validation text are also trained on
          - if path.resolve() not in validated]
          + if path not in validated or True]
    seen by unit/test_data_ready_made.py
        token files: changed files count as the same source
          - path.stat().st_size, path.stat().st_mtime_ns) for path in files]
          + 0, 0) for path in files]
    seen by unit/test_data_sources.py
        text: a byte order mark becomes text
          - encoding="utf-8-sig"
          + encoding="utf-8"
        text: the row numbers of a parquet file start again with each batch
          - start=rows - len(batch) + 1):
          + start=1):
        text: a separator with Windows line ends is never found
          - separator.replace("\r\n", "\n")
          + separator
    seen by unit/test_data_progress.py
        text: skipped files of a folder are not mentioned
          - f"{ending} ({count})" for ending in SKIPPED if (count := skipped[ending])
          + f"{ending}" for ending in () if (count := skipped[ending])
    seen by unit/test_data_stories.py
        text: a truncated gzip file leads to a traceback
          - DAMAGED_GZIP = (EOFError,␣
          + DAMAGED_GZIP = (
    """,
    "llmtrain/data/mixture.py": r"""
    seen by unit/test_data_mixture.py
        mixture: the entries left by rounding go to the first texts
          - by_remainder = sorted(range(len(weights)), key=lambda text: shares[text] - exact[text])
          + by_remainder = list(range(len(weights)))
        mixture: every block has the same order
          - np.random.default_rng([self._seed, block])
          + np.random.default_rng([self._seed, 0])
        mixture: a text starts again in every block
          - return text, block * self.shares[text] + int(ranks[index])
          + return text, int(ranks[index])
        mixture: a hub text is prepared only for its mean share
          - return min(entries, -(-entries // BLOCK) * share)
          + return entries * share // BLOCK
    """,
    "llmtrain/data/mixture_loader.py": r"""
    seen by unit/test_data_mixture.py
        mixture: samples that slow replicas left count as read
          - counts -= self.order.count(range(start, stop))
          + pass
        mixture: a resumed run loses the sizes of a text that has grown
          - given = sizes or [()] * len(self.samples)
          + given = [()] * len(self.samples)
        mixture: texts are joined with their incomplete samples
          - self._starts = np.cumsum([0, *(number * sequence_length for number in samples)])
          + self._starts = np.cumsum([0, *map(len, texts)])
    """,
    "llmtrain/data/order.py": r"""
    seen by unit/test_batch_shares.py
        shares: the samples that a slow replica left count as an equal part
          - state.get("part", (number * equal, (number + 1) * equal, global_batch))
          + (number * equal, (number + 1) * equal, global_batch)
    seen by unit/test_data_loader.py
        length: data that has grown has another order
          - sizes = [*(size for size in sizes if size < now), now]
          + sizes = [now]
        loader: every epoch has the same order
          - np.random.default_rng([self._seed, epoch,␣
          + np.random.default_rng([self._seed, 0,␣
    seen by unit/test_data_loader.py, unit/test_data_blocks.py
        length: every epoch has the added samples at its end
          -         if epoch:
          -             return 0, self.num_samples
          -
    seen by unit/test_data_cursors.py
        unread: one batch that was read counts as unread
          - while replica.num_read < ahead:
          + while replica.num_read <= ahead:
    seen by unit/test_data_blocks.py
        blocks: a block ends where the available samples end
          - return first, min([end, *(size for size in ends if size > index)])
          + return first, max(index + 1, min([end, *ends, self._wait(first) if self._wait else end]))
        blocks: a block that a shorter run has divided is shuffled as one
          - ends = [*self.sizes, self.num_samples]
          + ends = [self.num_samples]
        blocks: permutations of read samples stay in memory
          - if epoch * self.num_samples + first + len(part) > before
          + if True
    """,
}
