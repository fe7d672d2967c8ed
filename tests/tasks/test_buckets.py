"""The lengths that rows are padded to."""

import numpy as np

from bertjax.tasks import shapes as buckets


def test_buckets_waste_the_fewest_padding_tokens():
    rng = np.random.default_rng(0)
    lengths = rng.integers(3, 129, 500)
    lengths = np.append(lengths, 128)
    found = buckets.choose_buckets(lengths, count=3)

    def padded(chosen):
        return sum(min(b for b in chosen if b >= n) for n in lengths)

    every = range(16, 129, 16)
    best = min(padded({a, b, 128}) for a in every for b in every)
    assert len(found) <= 3 and max(found) == 128
    assert padded(found) == best
    assert buckets.choose_buckets([7, 9, 12], count=3) == (16,)


def test_random_batches_pad_to_their_longest_rows():
    rng = np.random.default_rng(0)
    lengths = np.minimum(3 + rng.geometric(0.05, 5000), 128)
    found = buckets.longest_in_batches(lengths, 32)
    assert len(found) == 157 and found.max() == lengths.max()
    # P(longest of 32 <= n) is F(n)^32 for independent draws.
    share = np.mean(lengths <= 80) ** 32
    assert abs(np.mean(found <= 80) - share) < 4 * np.sqrt(share * (1 - share) / len(found))


def test_few_tokens_are_padded_to_one_length():
    assert [buckets.automatic_count([128] * n) for n in (10_000, 20_000, 200_000)] == [1, 2, 3]
