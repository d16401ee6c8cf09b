/*
 * Section 5: the exact, stable choice of regions.
 *
 * Scores become unsigned keys that order as section 5 says. One pass keeps, in index order, the keys above a
 * threshold; when the survivors' room fills up, they are cut down to the best `count` and the threshold rises
 * to the worst of these: a later key must be larger, as ties go to the earlier region. A sample of the row sets
 * the first threshold, so that neither ascending scores nor plateaus cost more than a few cuts.
 *
 * Bound by the pass: one load, compare and compress per LANES scores.
 * SPDX-License-Identifier: Apache-2.0
 */

enum {
    SELECT_ROOM = 8192, /* survivors */
    SELECT_SAMPLES = 1024,
    SELECT_SAMPLED = 4096 /* shorter rows are not sampled */
};

typedef struct select_survivors {
    int count;
    uint32_t key[SELECT_ROOM + LANES], region[SELECT_ROOM + LANES];
} select_survivors;

/* NaN becomes 1, below -inf; -0 and +0 are one; 0 is below all keys. */
static inline vi select_keys(vf x)
{
    vi bits = (vi)(x + vf_set1(0)), negative = 0 - (bits >> 31);
    return vi_choose((vi)(x == x), bits ^ (negative | 0x80000000U), vi_set1(1));
}

static uint32_t select_key(float x)
{
    return select_keys(vf_set1(x))[0];
}

/* The rank-th largest key, rank from 1; *equal of those that equal it are among the best `rank`. Radix, a byte
 * at a time from the top. */
static uint32_t select_nth(const uint32_t *keys, int count, int rank, int *equal)
{
    uint32_t prefix = 0, mask = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
        int bins[256] = {0}, bin = 255;
        for (int i = 0; i < count; i++)
            if ((keys[i] & mask) == prefix)
                bins[keys[i] >> shift & 255]++;
        for (; bins[bin] < rank; bin--)
            rank -= bins[bin];
        prefix |= (uint32_t)bin << shift;
        mask |= 255U << shift;
    }
    *equal = rank;
    return prefix;
}

/* Keeps the best `count`, in their order; returns the worst of them. */
static uint32_t select_cut(select_survivors *s, int count)
{
    int equal, kept = 0;
    uint32_t worst = select_nth(s->key, s->count, count, &equal);
    for (int i = 0; i < s->count; i++) {
        bool keep = s->key[i] > worst || (s->key[i] == worst && equal-- > 0);
        s->key[kept] = s->key[i];
        s->region[kept] = s->region[i];
        kept += keep;
    }
    s->count = kept;
    return worst;
}

/* A threshold that about count + 4 sqrt keys of the row are likely to pass; 0, which all pass, for short rows.
 */
static uint32_t select_guess(const float *scores, int64_t n, int count)
{
    if (n < SELECT_SAMPLED)
        return 0;
    uint32_t sample[SELECT_SAMPLES];
    int64_t step = n / SELECT_SAMPLES;
    for (int i = 0; i < SELECT_SAMPLES; i++)
        sample[i] = select_key(scores[i * step]);
    double expected = (double)count * SELECT_SAMPLES / (double)n;
    int equal, rank = (int)(expected + 4 * sqrt(expected) + 4);
    return select_nth(sample, SELECT_SAMPLES, rank < SELECT_SAMPLES ? rank : SELECT_SAMPLES, &equal) - 1;
}

static void select_pass(const float *scores, int64_t n, int count, uint32_t threshold, select_survivors *s)
{
    uint32_t lane[LANES];
    for (int i = 0; i < LANES; i++)
        lane[i] = (uint32_t)i;
    vi first = vi_load(lane);
    s->count = 0;
    for (int64_t region = 0; region < n; region += LANES) {
        float tail[LANES];
        const float *from = scores + region;
        if (n - region < LANES) {
            for (int i = 0; i < LANES; i++)
                tail[i] = i < n - region ? from[i] : 0;
            from = tail;
        }
        vi key = select_keys(vf_load(from)), passed = (vi)(key > threshold);
        if (n - region < LANES)
            passed &= (vi)(first < (uint32_t)(n - region));
        vi_compress(s->key + s->count, passed, key);
        s->count += vi_compress(s->region + s->count, passed, first + (uint32_t)region);
        if (s->count > SELECT_ROOM - LANES)
            threshold = select_cut(s, count);
    }
}

/* The `count` best of the regions [0, n), ascending; count < n < 2^32. */
static void select_best(const float *scores, int64_t n, int count, int64_t *best)
{
    select_survivors s;
    select_pass(scores, n, count, select_guess(scores, n, count), &s);
    if (s.count < count)
        select_pass(scores, n, count, 0, &s); /* the sample was too good */
    select_cut(&s, count);
    for (int i = 0; i < count; i++)
        best[i] = s.region[i];
}

static void select_row(void *data, int64_t row)
{
    const csa_select_args *a = data;
    csa_list list = csa_start_list(a, row);
    if (list.historical < list.current)
        select_best(csa_at(&a->scores, row, 0, 0), list.current, (int)list.historical, list.best);
    else
        for (int64_t region = 0; region < list.current; region++)
            list.best[region] = region;
}

static csa_status select_regions(const csa_context *context, const csa_select_args *args)
{
    int64_t regions = args->scores.shape[1], some = regions < 1000 ? regions + 1 : 1000;
    return csa_parallel_small(context, args->selected.shape[0], 4 * some, select_row, (void *)args);
}
