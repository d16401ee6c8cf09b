/*
 * Section 4: scores, one streaming pass over a request's summaries for all groups, heads and drafts.
 *
 * A tile of tokens (as many as keep 64 heads) and a span of regions are one piece of work. Per block of LANES
 * regions the e4m3 codes are decoded once into bf16 pairs; each quad of heads then takes LANES / 4 regions at a
 * time: LANES accumulators of LANES lanes, summed by one transpose. A product passes through 16 to 32 additions
 * in its lane and 3 or 4 across; the order depends on nothing but the tier.
 *
 * Bound by the dot products from 4 heads on, by memory below.
 * SPDX-License-Identifier: Apache-2.0
 */

enum {
    SCORE_HEADS = 64, /* heads whose queries are kept decoded, 32 KiB; one token may need twice that */
    SCORE_QUADS = CSA_MAX_GROUPS * CSA_MAX_HEADS / 4,
    SCORE_VECTORS = CSA_SUMMARY_SIZE / (2 * LANES),
    SCORE_AHEAD = 3,        /* blocks of LANES regions between prefetch and use */
    SCORE_TILE = LANES / 4, /* regions of one transpose */
    SCORE_MIN_SPAN = 512,
#ifdef CSA_VEC_FEW /* too few registers to decode beside the products */
    SCORE_APART = 1
#else
    SCORE_APART = 0
#endif
};

/* The quads of one row; quads whose weights are all zero are left out. */
typedef struct score_row_quads {
    int64_t row, last; /* last region to score */
    int first, count;
} score_row_quads;

typedef struct score_columns {
    vp query[SCORE_QUADS][SCORE_VECTORS][4];
    vf weights[SCORE_QUADS]; /* of the quad's heads, repeated for each region of a tile */
    score_row_quads rows[SCORE_QUADS];
    int quads, row_count;
} score_columns;

static void score_add_quad(score_columns *c, const csa_score_args *a, int64_t token, int64_t group,
                           int64_t head)
{
    const float *weights = csa_at(&a->weights, token, group, 0);
    int64_t left = a->query.shape[2] - head;
    float four[LANES];
    uint8_t zero[CSA_SUMMARY_SIZE] = {0};
    bool any = false;
    for (int i = 0; i < LANES; i++) {
        four[i] = i % 4 < left ? weights[head + i % 4] : 0;
        any = any || four[i] != 0;
    }
    if (!any)
        return;
    c->weights[c->quads] = vf_load(four);
    for (int h = 0; h < 4; h++) {
        const uint8_t *query = h < left ? csa_at(&a->query, token, group, head + h) : zero;
        for (int v = 0; v < SCORE_VECTORS; v += 2)
            vp_decode(query + (size_t)v * 2 * LANES, &c->query[c->quads][v][h], &c->query[c->quads][v + 1][h]);
    }
    c->quads++;
}

static void score_add_token(score_columns *c, const csa_score_args *a, int64_t token)
{
    int64_t groups = a->query.shape[1],
            position = csa_token_active(a->tokens, token) ? csa_token_position(a->tokens, token) : 0;
    for (int64_t group = 0; group < groups; group++) {
        score_row_quads *row = &c->rows[c->row_count++];
        row->row = token * groups + group;
        row->last = position / CSA_REGION < a->scores.shape[1] ? position / CSA_REGION : a->scores.shape[1] - 1;
        row->first = c->quads;
        for (int64_t head = 0; head < a->query.shape[2]; head += 4)
            score_add_quad(c, a, token, group, head);
        row->count = c->quads - row->first;
    }
}

static const uint8_t score_no_summary[SCORE_TILE * CSA_SUMMARY_SIZE];

/* Summaries of LANES regions from `region` on, of each `run` the first; the mask has a bit for each that is not
 * mapped. */
static inline unsigned score_find(const csa_score_args *a, int64_t request, int64_t region, int run,
                                  const uint8_t **summaries)
{
    const csa_tensor *t = &a->cache->summaries;
    unsigned missing = 0, shift = (unsigned)__builtin_ctzll((unsigned long long)t->shape[1]);
    int64_t per_block = t->shape[1], within = region & (per_block - 1);
    const uint8_t *next = NULL;
    for (int i = 0; i < LANES; i += run, region += run, within += run) {
        if (i == 0 || within == per_block) {
            int64_t block = csa_mapped_block(&a->tokens->block_table, request, region >> shift, t->shape[0]);
            within &= per_block - 1;
            next = block < 0 ? NULL : csa_at(t, block, within, 0);
        }
        summaries[i] = next ? next : score_no_summary;
        missing |= next ? 0 : ((1U << run) - 1) << i;
        next = next ? next + run * t->stride[1] : NULL;
    }
    return missing;
}

/* A tile's keys, decoded. */
typedef vp score_keys[SCORE_VECTORS][SCORE_TILE];

/* What is decoded beside a tile's products: the tile that comes next. */
typedef struct score_next {
    const uint8_t **summaries, **later;
    vp (*keys)[SCORE_TILE];
    int run; /* regions in one piece, at most SCORE_TILE: one address serves them */
} score_next;

/* Vectors v and v + 1 of the tile; asks for the same of a later block: requests to memory that pile
 * up are dropped. */
static inline void score_decode(const score_next *next, int v)
{
    for (int r = 0; r < SCORE_TILE; r++) {
        size_t at = (size_t)v * 2 * LANES;
        const uint8_t *const *summaries = next->summaries + r / next->run * next->run;
        const uint8_t *const *later = next->later + r / next->run * next->run;
        at += (size_t)(r % next->run) * CSA_SUMMARY_SIZE;
        __builtin_prefetch(*later + at, 0, 3);
        vp_decode(*summaries + at, &next->keys[v][r], &next->keys[v + 1][r]);
    }
}

/* Dots of one quad's heads with a tile's regions, weighted and added to their chains. */
static inline vf score_quad(const score_columns *c, int quad, vp keys[][SCORE_TILE], vf chain,
                            const score_next *next)
{
    vf acc[LANES];
    for (int i = 0; i < LANES; i++)
        acc[i] = vf_set1(0);
#pragma GCC unroll 1 /* a tile's keys and accumulators just fit the registers */
    for (int v = 0; v < SCORE_VECTORS; v += 2) {
        for (int u = 0; u < 2; u++)
            for (int h = 0; h < 4; h++) {
                vp query = c->query[quad][v + u][h];
                for (int r = 0; r < SCORE_TILE; r++)
                    acc[r * 4 + h] = vf_dot(acc[r * 4 + h], keys[v + u][r], query);
            }
        if (next)
            score_decode(next, v);
    }
    return vf_fma(c->weights[quad], vf_max(vf_sums(acc), vf_set1(0)), chain);
}

static void score_store(const csa_score_args *a, const score_row_quads *row, int64_t region, vf scores,
                        unsigned missing)
{
    float out[LANES], *to = csa_at(&a->scores, row->row, 0, 0);
    if (region > row->last)
        return;
    if (!missing && region + LANES <= a->scores.shape[1]) {
        vf_store(to + region, scores);
        return;
    }
    vf_store(out, scores);
    for (int i = 0; i < LANES && region + i < a->scores.shape[1]; i++)
        to[region + i] = missing >> i & 1 ? 0 : out[i];
}

/* One tile for all rows; the first quad's products go with decoding the next tile. */
static inline void score_tile(const score_columns *c, vp keys[][SCORE_TILE], const score_next *next, int t,
                              vf chain[][4])
{
    for (int v = 0; SCORE_APART && v < SCORE_VECTORS; v += 2)
        score_decode(next, v);
    for (int i = 0, quad = 0; i < c->row_count; i++) {
        int end = c->rows[i].first + c->rows[i].count;
        vf sum = vf_set1(0);
        if (quad == 0 && end > 0)
            sum = score_quad(c, quad++, keys, sum, SCORE_APART ? NULL : next);
        for (; quad < end; quad++)
            sum = score_quad(c, quad, keys, sum, NULL);
        chain[i][t] = sum;
    }
}

static inline void score_runs(const csa_score_args *a, const score_columns *c, int64_t request, int64_t first,
                              int64_t end, int run)
{
    enum { KEPT = SCORE_AHEAD + 1 };
    const uint8_t *found[KEPT][LANES];
    unsigned missing[KEPT];
    score_keys keys[2];
    for (int i = 0; i < SCORE_AHEAD; i++)
        missing[i] = score_find(a, request, first + i * LANES, run, found[i]);
    score_next start = {found[0], found[0], keys[0], run};
    for (int v = 0; v < SCORE_VECTORS; v += 2)
        score_decode(&start, v);
    int now = 0;
    for (int64_t region = first; region < end; region += LANES, now = (now + 1) % KEPT) {
        int after = (now + 1) % KEPT, later = (now + SCORE_AHEAD) % KEPT;
        vf chain[SCORE_QUADS][4];
        missing[later] = score_find(a, request, region + SCORE_AHEAD * LANES, run, found[later]);
        for (int t = 0; t < 4; t++) {
            score_next next = {t < 3 ? found[now] + (t + 1) * SCORE_TILE : found[after],
                               found[later] + t * SCORE_TILE, keys[(t + 1) & 1], run};
            score_tile(c, keys[t & 1], &next, t, chain);
        }
        for (int i = 0; i < c->row_count; i++)
            score_store(a, &c->rows[i], region, vf_chains(chain[i]), missing[now]);
    }
}

/* Regions [first, end) for the columns' rows, all of one request. */
static void score_span(const csa_score_args *a, const score_columns *c, int64_t request, int64_t first,
                       int64_t end)
{
    const csa_tensor *t = &a->cache->summaries;
    if (t->stride[1] != CSA_SUMMARY_SIZE)
        score_runs(a, c, request, first, end, 1);
    else if (t->shape[1] < SCORE_TILE)
        score_runs(a, c, request, first, end, 2);
    else
        score_runs(a, c, request, first, end, SCORE_TILE);
}

/* Share `span` of `spans` of the regions that tokens [first, end), all of one request, see. */
static void score_tokens(const csa_score_args *a, int64_t first, int64_t end, int64_t span, int64_t spans)
{
    score_columns c;
    int64_t last = -1;
    c.quads = c.row_count = 0;
    for (int64_t token = first; token < end; token++)
        score_add_token(&c, a, token);
    for (int i = 0; i < c.row_count; i++)
        last = c.rows[i].last > last ? c.rows[i].last : last;
    int64_t blocks = (last + LANES) / LANES;
    int64_t from = blocks * span / spans * LANES, to = blocks * (span + 1) / spans * LANES;
    score_span(a, &c, csa_token_owner(a->tokens, first), from, to < last + 1 ? to : last + 1);
}

typedef struct score_work {
    const csa_score_args *args;
    int64_t tile, spans;
} score_work;

static void score_piece(void *data, int64_t index)
{
    const score_work *w = data;
    int64_t tokens = w->args->query.shape[0], first = index / w->spans * w->tile;
    int64_t end = first + w->tile < tokens ? first + w->tile : tokens;
    while (first < end) {
        int64_t next = first + 1, owner = csa_token_owner(w->args->tokens, first);
        while (next < end && csa_token_owner(w->args->tokens, next) == owner)
            next++;
        score_tokens(w->args, first, next, index % w->spans, w->spans);
        first = next;
    }
}

static csa_status score(const csa_context *context, const csa_score_args *args)
{
    csa_score_args rows = *args;
    rows.scores = (csa_tensor){0};
    csa_status status = args->rows_out ? csa_ref_score(context, &rows) : CSA_OK;
    if (status != CSA_OK || !csa_present(&args->scores))
        return status;
    int64_t tokens = args->query.shape[0], heads = (args->query.shape[2] + 3) / 4 * 4;
    score_work w = {.args = args, .tile = SCORE_HEADS / (args->query.shape[1] * heads)};
    w.tile = w.tile ? w.tile : 1;
    int64_t tiles = (tokens + w.tile - 1) / w.tile, most = args->scores.shape[1] / SCORE_MIN_SPAN + 1;
    w.spans = tiles ? (4 * context->threads + tiles - 1) / tiles : 1;
    w.spans = context->threads == 1 ? 1 : w.spans < most ? w.spans : most;
    return csa_parallel(context, tiles * w.spans, score_piece, &w);
}
