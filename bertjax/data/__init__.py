"""Text -> documents -> sentences -> a token store -> sentence pairs -> rows, padded or packed.

The way of a text through the modules, in this order:

    documents, sentences    files of any format -> documents of sentences (opening, sources)
    build, shard, finish    documents -> the token store, in parallel (workers; beam: Apache Beam)
    store, verification     the store, memory-mapped, and checked (remote: at gs:// too)
    pairs                   which sentences form the next-sentence pairs of an epoch
    rows, packing           a pair a row, or several
    batches, global_batch   rows of a step, as a function of (seed, step)
    masking                 on the device: what is to be predicted
    bert_tfrecord, tfrecord instead of all that: the original's masked records (bert_example)
"""
