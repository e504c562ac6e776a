"""Mistakes in llmtrain/data, p to z."""

TABLES = {
    "llmtrain/data/prepare.py": r"""
    seen by unit/test_data_one_document.py
        prepare: the advice for equal documents is to give more of them
          - else 1 - data.validation_fraction) > MANY:
          + else 1 - data.validation_fraction) > 10**9:
        prepare: a text without validation documents is tokenized before it is refused
          - if not data.source.startswith(HUB) and find_ready_made(data) is None:
          + if False:
        prepare: the search for first documents reads the whole text
          - if len(found) == len(splits_of(data, key)):
          + if False:
        prepare: paragraphs are advised although a separator was given
          - "" if data.separator != DataSection().separator else
          + "" if False else
    seen by unit/test_data_damage.py
        prepare: a lock on a disk that does not answer is the folder's fault
          -         raise data_error(problem, error) from None
          -     with lock:
          +         raise DataError(problem) from None
          +     with lock:
    seen by unit/test_data_prepare.py
        prepare: two bytes for every vocabulary
          - "<u2" if vocabulary <= 1 << 16 else "<u4"
          + "<u2"
        prepare: a missing tokenizer goes unnoticed
          - if not config.is_file():
          + if False:
        tokens: a long file name makes a folder's name that is too long
          - [:100]}-{digest}"
          + }-{digest}"
    seen by unit/test_data_damage.py, unit/test_data_prepare.py
        prepare: half-made folders are left
          - directory.parent.glob(f"{directory.name}.*-tmp")
          + directory.parent.glob(f"{directory.name}-tmp")
    seen by unit/test_python_files.py
        python: the record of packages is empty
          - (new / PACKAGES).write_text(python_text().record,
          + (new / PACKAGES).write_text("",
    seen by unit/test_data_sentencepiece.py
        tokenizer: the size of the sample is not part of its identity
          - identity["tokenizer_sample_bytes"] = sample
          + pass
    seen by unit/test_data_ready_made.py
        token files: the number of held-out files is not part of a folder's name
          -         identity["validation_files"] = len(ready_made.validation)
          +         pass
    """,
    "llmtrain/data/python_files.py": r"""
    seen by unit/test_python_files.py
        python: equal files are read more than once
          - if text and digest not in seen:
          + if text:
        python: files are not shuffled across packages
          - sorted(files, key=lambda pair: _name_hash(f"{pair[0]}/{pair[1].name}"))
          + sorted(files)
        python: tests are read
          - {"..", *TESTS} & set(file.parts)
          + {".."} & set(file.parts)
        python: the version of a package is not on record
          - return PackageRecord(self.name, self.version, len(self.files)
          + return PackageRecord(self.name, "1.0", len(self.files)
        python: the digest covers names and sizes only
          - f"{file.name} {file.bytes} {file.recorded}"
          + f"{file.name} {file.bytes}"
        python: other versions hold out other packages
          - for pin in sorted(self.pinned, key=lambda pin: _name_hash(pin.name)):
          + for pin in sorted(self.records, key=lambda pin: _name_hash(pin.name)):
        python: more is held out than asked for
          -                 room -= pin.bytes
          -
    """,
    "llmtrain/data/ready_made.py": r"""
    seen by unit/test_data_ready_made.py
        token files: a validation part begins where its file does
          - offset = (shard.offset or 0) + low * np.dtype(shard.dtype).itemsize
          + offset = shard.offset or 0
        token files: validation begins within a document
          -             return start + int(found[0]) + 1
          +             return start + int(found[0])
        token files: a shorter validation is not prepared anew
          - return ready_made is None or len(prepared.tokens("validation")) in ready_made.validation_bytes
          + return ready_made is None or bool(ready_made.validation_bytes)
        token files: tokens of four bytes are read as twice as many
          - has_even and not has_odd
          + False
        token files: has_eos also depends on the validation text
          - has_eos=has_eos["train"])
          + has_eos=all(has_eos.values()))
        token files: a character that is cut off at the end counts
          - for cut in range(4):
          + for cut in range(1):
    """,
    "llmtrain/data/same_tokens.py": r"""
    seen by distributed/test_same_tokens.py
        same: the advice for a local text is to copy a prepared folder
          - if source.startswith(HUB):
          + if True:
        same: only the rank with a failing disk raises an error
          - except UnavailableError as error:
          + except OSError as error:
    """,
    "llmtrain/data/sentencepiece_model.py": r"""
    seen by unit/test_data_sentencepiece.py
        sentencepiece: no space before a text that begins with one
          - steps.append(normalizers.Prepend(SPACE))
          + steps.append(normalizers.Replace(Regex(f"^(?!{SPACE})"), SPACE))
        sentencepiece: merges are in the order of ids, not of scores
          - merges=merges_of(sorted(score, key=lambda piece: -score[piece])),
          + merges=merges_of(sorted(score)),
        sentencepiece: a special piece is found in a text
          -     if not is_bpe:
          -
          +     if not special:
          +
    """,
    "llmtrain/data/sites.py": r"""
    seen by unit/test_batch_shares.py
        shares: a site's replicas have the shares of the run's first replicas
          - shares=tuple(shape.shares[number] for number in own) if
          + shares=shape.shares[: len(own)] if
        shares: the mean is over the replicas of the site, not of the run
          - self.mean_replica_tokens = shape.global_batch * shape.sequence_length / shape.replicas
          + pass
    seen by unit/test_data_sites.py
        sites: all replicas of a site read the same samples
          - replica=own.index(shape.replica)
          + replica=0
        sites: a site that is absent is forgotten
          - return states[0].get("absent", {}) | merged
          + return merged
        sites: a cursor belongs to the replica's number
          - old_batch is None and self._has_parts_of(states):
          + old_batch is None:
        sites: with another batch, each replica reads on from its own place
          - if not change.replicas_changed and old_batch is None and
          + if not change.replicas_changed and
        sites: cursors are merged with the new batch
          - self._by_site(states, old_batch or self._run.global_batch)
          + self._by_site(states, self._run.global_batch)
        sites: cursors are merged as if all replicas were at the site
          - return run_batch // replicas * members
          + return run_batch
        sites: an absent site forgets how many samples it had
          - super().state_dict() | {"sizes": self.order.sizes, "site": self.site} | absent
          + super().state_dict() | {"site": self.site} | absent
        sites: tokenizers with another eos token are the same
          - f"{prepared.vocab_size} {prepared.eos_id} {content}"
          + f"{prepared.vocab_size} {content}"
    seen by distributed/test_sites.py::test_what_one_site_lacks_is_an_error_at_all
        sites: different tokenizers are accepted
          - if text.tokenizer != first.tokenizer:
          + if False:
    """,
    "llmtrain/data/sources.py": r"""
    seen by unit/test_data_sources.py
        sources: an error does not say that a correction of the text loses tokens
          - f"{error}; {ANEW}" if self.documents else
          + f"{error}; {ANEW}" if False else
        sources: a failing disk is the text's fault
          - except UnavailableError:
          + except ZeroDivisionError:
    seen by unit/test_data_sources.py, unit/test_data_prepare.py
        sources: the splits are swapped
          - "validation" if is_held_out else "train"
          + "train" if is_held_out else "validation"
    seen by unit/test_data_hub.py
        hub: the splits are swapped
          - split = data.split if self._key == "data.source" else data.validation
          + split = data.validation if self._key == "data.source" else data.split
    seen by unit/test_data_stories.py
        stories: the notice is a story
          - islice(documents_of_file(path, DataSection(), read), 1, None)
          + documents_of_file(path, DataSection(), read)
        stories: a local folder of the same name is ignored
          -     _refuse_local(STORIES, "this package's text")
          -
        stories: every installation of the package tokenizes them again
          - hashlib.blake2b(_stories_file().read_bytes(), digest_size=8).hexdigest()
          + str(_stories_file())
        stories: a user's separator divides them
          - documents_of_file(path, DataSection(), read)
          + documents_of_file(path, data, read)
    seen by unit/test_python_files.py
        python: single files are held out instead of packages
          - package in chosen if package else _held_out(text, data.validation_fraction)
          + _held_out(text, data.validation_fraction)
        python: the identity of the tokens does not contain the packages
          - identity["python"] = _python_text().records
          + identity["python"] = []
    seen by unit/test_data_sources.py
        stream: text that is skipped is not reported
          -                 self._on_skipped(number)
          +                 pass
    """,
    "llmtrain/data/stream.py": r"""
    seen by unit/test_data_damage.py
        stream: an index is known by its time alone
          - (found.st_ino, found.st_size, found.st_mtime_ns)
          + (0, 0, found.st_mtime_ns)
    seen by unit/test_data_stream.py
        stream: progress does not extend the wait
          - before, last_progress = progress, now
          + before = progress
        stream: more tokens than the run's are read
          - self._tokens = TokenShards(self._shards, self.max_tokens)
          + self._tokens = TokenShards(self._shards)
        stream: an error of the tokenizer is waited out
          - if "error" in status:
          + if False:
        data: an index whose time can't be read ends the thread
          -         stamp = (0, 0, 0)
          -
    """,
    "llmtrain/data/text_identity.py": r"""
    seen by unit/test_text_identity.py
        identity: a text that has grown passes
          - if self.is_fixed and other.is_fixed and self.tokens != other.tokens:
          + if False:
        identity: a text that is shorter than a window is not compared
          - if 0 < len(tokens) < WINDOW:
          + if False:
        identity: a short text may not grow
          - min(self.tokens, other.tokens) < WINDOW
          + False
        identity: only the beginning of a text is compared
          - start = max(start + WINDOW, int(start * SPACING))
          + return
    """,
    "llmtrain/data/text_list.py": r"""
    seen by unit/test_text_list.py
        sites: a node prepares all texts
          - if not data.per_replica or replicas is None:
          + if True:
        lists: each text of a mixture trains a tokenizer
          - if first is None or trained_size(section.tokenizer) is None:
          + if True:
    """,
    "llmtrain/data/token_digests.py": r"""
    seen by distributed/test_same_tokens.py
        same: only token counts are compared
          - digest.update(window.astype("<u4").tobytes())
          + pass
    """,
    "llmtrain/data/token_files.py": r"""
    seen by unit/test_data_ready_made.py
        token files: the header is read as tokens
          - return TokenFile(path, "llm.c", dtype, 4 * HEADER_INTS, tokens, size)
          + return TokenFile(path, "llm.c", dtype, 0, tokens, size)
    seen by unit/test_wrong_tokens.py
        token files: an index may have gaps
          - if (lengths < 0).any() or not np.array_equal(begins, pointers[start : start + CHUNK]):
          + if (lengths < 0).any():
        token files: text is read as tokens
          -     if len(text) >= 2 and all(
          +     if len(text) >= 1e9 and all(
    """,
    "llmtrain/data/token_ids.py": r"""
    seen by unit/test_wrong_tokens.py
        token files: negative ids are tokens
          - (ids.max() < self.size and ids.min() >= 0)
          + ids.max() < self.size
    seen by unit/test_data_ready_made.py
        token files: an id equal to the vocabulary's size is accepted
          - ids.max() < self.size and
          + ids.max() <= self.size and
        token files: the scan reads only the first tokens
          - for first in range(0, tokens, len(buffer)):
          + for first in range(0, min(tokens, len(buffer)), len(buffer)):
    """,
    "llmtrain/data/tokenizer.py": r"""
    seen by unit/test_data_tokenizer.py
        tokenizer: a text that quotes eos ends there
          - if not _finds_eos(tokenizer):
          -         return False
          + if True:
          +         return False
        tokenizer: an eos token that can't be hidden is taken
          - if not _finds_eos(tokenizer):
          -             return True
          + if True:
          +             return True
        tokenizer: eos is hidden before words are marked
          - pre_tokenizers.Sequence([*steps, hiding([eos])])
          + pre_tokenizers.Sequence([hiding([eos]), *steps])
        tokenizer: a custom class loses what hides eos
          -             _record_general_class(cache)
          +             pass
    seen by unit/test_data_sentencepiece.py
        tokenizer: the model is not kept
          - if new.model is not None:
          + if new.model is None:
    seen by unit/test_wrong_files.py
        tokenizer: its settings are not tried on a text
          -             if try_out:
          +             if False:
    seen by unit/test_pretrained.py
        tokenizer: damage is described in Python's words
          - raise error(reason(caught)) from None
          + raise error(first_line(caught)) from None
    """,
    "llmtrain/data/tokenizing.py": r"""
    seen by unit/test_data_prepare.py
        prepare: every piece of a document ends with eos
          - end[: int(is_last)]]
          + end]
        prepare: a quoted eos ends a document
          - backend.encode_special_tokens = True
          + backend.encode_special_tokens = False
    seen by unit/test_data_tokenizing.py
        tokenizing: all of a long document is tokenized at once
          - if characters >= PIECES_AT_ONCE * PIECE_CHARACTERS:
          + if False:
        tokenizing: the library's objects of a long document are kept
          - [ids if is_last else _as_array(ids) for ids,
          + [ids for ids,
        num_proc: a killed process is the text's fault
          - return UnavailableError(
          + return DataError(
        num_proc: batches are taken in the wrong order
          -         found = self._result(waiting[0])
          -         waiting.popleft()
          -
          +         found = self._result(waiting[-1])
          +         waiting.pop()
          +
        num_proc: text that was read before an error is lost
          -         except DataError:  # of the source; text that was read before it is not lost
          -             while waiting:
          -
          +         except DataError:
          +             while False:
          +
        num_proc: processes are left behind
          -     threading.Thread(target=_end_with_parent, daemon=True).start()
          -
        tokenizing: batches after one that failed are kept
          -         found = self._result(waiting[0])
          -         waiting.popleft()
          -
          +         found = self._result(waiting.popleft())
          +
    """,
    "llmtrain/data/trained_tokenizer.py": r"""
    seen by unit/test_data_tokenizer.py
        tokenizer: the stride of the sample does not double
          - kept, stride = kept[::2], stride * 2
          + kept, stride = kept[::2], stride
    """,
}
