"""Text -> documents -> sentences -> a token store -> sentence pairs -> rows, padded or packed -> batches.

The way of a text through the modules, in this order:

    sources, documents, sentences   files of any format -> documents of sentences (opening)
    build, shards, splits           documents -> the token store, in parallel (also on Apache Beam)
    store, verification             the store, memory-mapped, and checked (remote: at gs:// too)
    pairs, laws                     the sentence pairs of an epoch; what must hold of a corpus
    rows, batches                   pairs -> rows -> the batch of a step, a function of (seed, step)
    masking                         on the device: what is to be predicted
    bert_records                    instead of all that: the original's masked records
"""
