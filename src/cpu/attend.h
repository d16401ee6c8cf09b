/*
 * Section 6: attention to the selected regions.
 *
 * A row's list is folded in units of 16 entries, counted from its first live one; the units' sums (largest
 * logit, sum of weights, weighted values) join in a fixed binary tree, so that units may be computed anywhere:
 * all units of all rows are cut into equal shares, and what a share knows of a row that it does not hold alone
 * waits in the context's scratch. Within a unit, tiles of a few regions go through an online softmax in base 2.
 * Weights are rounded to bf16 for the product with V, their sum is not.
 *
 * Two layouts: `wide` (9 to 16 heads) has heads in lanes and broadcasts pairs of K's and V's values, so that
 * nothing is ever summed across lanes; `narrow` (1 to 8 heads) has K's and V's values in lanes.
 *
 * SPDX-License-Identifier: Apache-2.0
 */

enum {
    HEAD_LANES = CSA_MAX_HEADS / LANES, /* vectors that hold 16 heads */
    UNIT = 16,                          /* regions of a unit */
    TILE = 4,                           /* regions of a tile */
    TILE_TOKENS = TILE * CSA_REGION,
    PAIRS = CSA_HEAD_SIZE / 2,                 /* pairs of values of a key */
    KEY_VECTORS = CSA_HEAD_SIZE / (2 * LANES), /* of pairs */
    VALUE_VECTORS = CSA_HEAD_SIZE / LANES,     /* of floats */
    TREE_LEVELS = 14                           /* parts of a row's 65 units that may wait at once */
};

/* A region of the row's list. */
typedef struct attend_region {
    const char *kv; /* its first token */
    int tokens;     /* 1 to 8 */
} attend_region;

/* The sums over some units, logits in base 2. acc is [192][16 heads] in wide, [heads][192] in narrow. */
typedef struct attend_sums {
    int first, units;
    bool any; /* did a token contribute? */
    float max[CSA_MAX_HEADS], weight[CSA_MAX_HEADS];
    float acc[CSA_MAX_HEADS * CSA_HEAD_SIZE];
} attend_sums;

typedef struct attend_row {
    const csa_attend_args *args;
    int64_t token, group, heads, owner, last; /* last: region of the row's position */
    const int64_t *entries;                   /* of its list that are live */
    int count, last_tokens;                   /* of these; tokens of the last region */
    int64_t token_bytes, row_bytes;
    float scale;                  /* of dots, to base 2 */
    vp query[PAIRS * HEAD_LANES]; /* wide: [pair][heads]; narrow: [quad][vector][head of quad] */
} attend_row;

/* A tile's keys and values, ready to use, and where the next tile's rows are. */
typedef struct attend_tile {
    int tokens[TILE];
    const char *next[TILE_TOKENS];
    uint32_t keys[TILE_TOKENS][PAIRS];
    uint32_t values[TILE_TOKENS / 2][CSA_HEAD_SIZE]; /* pairs (even token, odd token) */
} attend_tile;

static const uint16_t attend_zeros[CSA_KV_SIZE];

/* ---- Loading ------------------------------------------------------------------------------------ */

static void attend_decode(const uint8_t *codes, uint16_t *to)
{
    for (int i = 0; i < CSA_KV_SIZE; i += 4 * LANES) {
        vi first, second;
        vp_decode_in_order(codes + i, &first, &second);
        vi_store(to + i, first);
        vi_store(to + i + 2 * LANES, second);
    }
}

static void attend_pair_values(const uint16_t *even, const uint16_t *odd, uint32_t *to)
{
    for (int i = 0; i < CSA_HEAD_SIZE; i += LANES)
        vi_store(to + i, (vi)vf_load_bf16(even + i) >> 16 | (vi)vf_load_bf16(odd + i));
}

/* Asks for a cache line of a later token's row. Done between computations: requests that pile up are dropped.
 */
static inline void attend_ask(const attend_row *row, const char *later, int line)
{
    if (line * 64 < row->row_bytes)
        __builtin_prefetch(later + line * 64, 0, 2);
}

/* A token's row in bf16: in place, or decoded into `room`; zeros for a token that is not seen. */
static const uint16_t *attend_token(const attend_row *row, const attend_region *region, int t, bool seen,
                                    uint16_t *room)
{
    if (!seen)
        return attend_zeros;
    const char *token = region->kv + t * row->token_bytes;
    if (row->args->cache->kv.dtype == CSA_BF16)
        return (const void *)token;
    attend_decode((const void *)token, room);
    return room;
}

/* The next TILE regions, as far as there are: `count` belong to the unit, `listed` are known. */
static void attend_load(const attend_row *row, const attend_region *regions, int count, int listed,
                        attend_tile *tile)
{
    uint16_t room[2][CSA_KV_SIZE];
    for (int i = 0; i < TILE_TOKENS; i += 2) {
        int r = i / CSA_REGION, t = i % CSA_REGION, seen = r < count ? regions[r].tokens : 0;
        tile->tokens[r] = seen;
        const uint16_t *even = attend_token(row, &regions[r], t, t < seen, room[0]);
        const uint16_t *odd = attend_token(row, &regions[r], t + 1, t + 1 < seen, room[1]);
        memcpy(tile->keys[i], even, sizeof tile->keys[i]);
        memcpy(tile->keys[i + 1], odd, sizeof tile->keys[i]);
        attend_pair_values(even + CSA_HEAD_SIZE, odd + CSA_HEAD_SIZE, tile->values[i / 2]);
    }
    for (int i = 0; i < TILE_TOKENS; i++) {
        int r = i / CSA_REGION + TILE, t = i % CSA_REGION;
        bool later = r < listed && t < regions[r].tokens;
        tile->next[i] = later ? regions[r].kv + t * row->token_bytes : (const char *)attend_zeros;
    }
}

/* ---- Online softmax, lane by lane --------------------------------------------------------------- */

/* What is subtracted from logits: the largest so far; 0 as long as that is -inf, so that weights become 0. */
static inline vf attend_base(vf max)
{
    return vf_choose((vi)(max == vf_set1(-INFINITY)), vf_set1(0), max);
}

/* Two weights rounded to bf16, the even token's in the low half. */
static inline vi attend_pair(vf even, vf odd)
{
    return vi_bf16(even) | vi_bf16(odd) << 16;
}

/* ---- Wide --------------------------------------------------------------------------------------- */

static void wide_query(attend_row *row)
{
    uint32_t pairs[PAIRS][CSA_MAX_HEADS] = {{0}};
    for (int64_t head = 0; head < row->heads; head++)
        for (int i = 0; i < PAIRS; i++)
            memcpy(&pairs[i][head],
                   (const uint16_t *)csa_at(&row->args->query, row->token, row->group, head) + 2 * i, 4);
    for (int i = 0; i < PAIRS * HEAD_LANES; i++)
        row->query[i] = vp_load(&pairs[0][0] + i * LANES);
}

/* logits[token][heads] of the region whose first key is keys[0]. */
static inline void wide_logits(const attend_row *row, const uint32_t (*keys)[PAIRS], const char *const *next,
                               vf (*logits)[HEAD_LANES])
{
    enum { TOKENS = CSA_REGION / HEAD_LANES, PART = PAIRS / CSA_REGION };
    for (int t = 0; t < CSA_REGION; t += TOKENS) {
        vf acc[TOKENS][HEAD_LANES];
        for (int i = 0; i < TOKENS; i++)
            for (int h = 0; h < HEAD_LANES; h++)
                acc[i][h] = vf_set1(0);
        for (int pair = 0; pair < PAIRS; pair += PART)
            for (int p = 0; p < PART; p++) {
                attend_ask(row, next[pair / PART], p);
                for (int i = 0; i < TOKENS; i++)
                    for (int h = 0; h < HEAD_LANES; h++)
                        acc[i][h] = vf_dot(acc[i][h], row->query[(pair + p) * HEAD_LANES + h],
                                           vp_set1(keys[t + i][pair + p]));
            }
        memcpy(logits[t], acc, sizeof acc);
    }
}

/* Weights of a tile from its logits, in pairs; updates max and weight and returns the factor for acc. */
static inline vf wide_softmax(attend_sums *s, int h, const attend_tile *tile, vf (*logits)[HEAD_LANES],
                              float scale, vp (*pairs)[HEAD_LANES])
{
    vf old = vf_load(s->max + h * LANES), max = old, sum = vf_set1(0);
    for (int i = 0; i < TILE_TOKENS; i++) {
        bool seen = i % CSA_REGION < tile->tokens[i / CSA_REGION];
        logits[i][h] = seen ? logits[i][h] * scale : vf_set1(-INFINITY);
        max = vf_max(logits[i][h], max);
    }
    vf base = attend_base(max), factor = vf_exp2(old - base);
    for (int i = 0; i < TILE_TOKENS; i += 2) {
        vf even = vf_exp2(logits[i][h] - base), odd = vf_exp2(logits[i + 1][h] - base);
        sum = sum + (even + odd);
        pairs[i / 2][h] = vp_of(attend_pair(even, odd));
    }
    vf_store(s->max + h * LANES, max);
    vf_store(s->weight + h * LANES, vf_load(s->weight + h * LANES) * factor + sum);
    return factor;
}

enum {
    WIDE_DIMS = HEAD_LANES == 1 ? 24 : 6
}; /* accumulators that stay in registers, once loops are unrolled */

static inline void wide_values(attend_sums *s, const attend_tile *tile, const vf *factor,
                               vp (*pairs)[HEAD_LANES])
{
    for (int d = 0; d < CSA_HEAD_SIZE; d += WIDE_DIMS) {
        vf acc[WIDE_DIMS][HEAD_LANES];
#pragma GCC unroll 24
        for (int i = 0; i < WIDE_DIMS; i++)
            for (int h = 0; h < HEAD_LANES; h++)
                acc[i][h] = vf_load(s->acc + (d + i) * CSA_MAX_HEADS + h * LANES) * factor[h];
        for (int pair = 0; pair < TILE_TOKENS / 2; pair++) {
#pragma GCC unroll 24
            for (int i = 0; i < WIDE_DIMS; i++)
                for (int h = 0; h < HEAD_LANES; h++)
                    acc[i][h] = vf_dot(acc[i][h], pairs[pair][h], vp_set1(tile->values[pair][d + i]));
        }
#pragma GCC unroll 24
        for (int i = 0; i < WIDE_DIMS; i++)
            for (int h = 0; h < HEAD_LANES; h++)
                vf_store(s->acc + (d + i) * CSA_MAX_HEADS + h * LANES, acc[i][h]);
    }
}

static void wide_tile(const attend_row *row, const attend_tile *tile, attend_sums *s)
{
    vf logits[TILE_TOKENS][HEAD_LANES], factor[HEAD_LANES];
    vp pairs[TILE_TOKENS / 2][HEAD_LANES];
    for (int r = 0; r < TILE; r++)
        wide_logits(row, (const uint32_t(*)[PAIRS])tile->keys + r * CSA_REGION, tile->next + r * CSA_REGION,
                    logits + r * CSA_REGION);
    for (int h = 0; h < HEAD_LANES; h++)
        factor[h] = wide_softmax(s, h, tile, logits, row->scale, pairs);
    wide_values(s, tile, factor, pairs);
}

/* ---- Narrow ------------------------------------------------------------------------------------- */

enum {
    NARROW_REGIONS = LANES / 4,                                      /* of one transpose */
    NARROW_VECTORS = LANES == 16 ? VALUE_VECTORS : VALUE_VECTORS / 4 /* of a value row, accumulated at a time */
};

static void narrow_query(attend_row *row)
{
    memset(row->query, 0, sizeof row->query);
    for (int64_t head = 0; head < row->heads; head++)
        for (int v = 0; v < KEY_VECTORS; v++)
            row->query[(head / 4 * KEY_VECTORS + v) * 4 + head % 4] = vp_load(
                (const uint16_t *)csa_at(&row->args->query, row->token, row->group, head) + v * 2 * LANES);
}

/* Logits of token t of each of NARROW_REGIONS regions, lane region * 4 + head of the quad. */
static inline vf narrow_logits(const attend_row *row, const vp *query, const uint32_t (*keys)[PAIRS],
                               const char *const *next, int t)
{
    vf acc[LANES];
    for (int i = 0; i < LANES; i++)
        acc[i] = vf_set1(0);
    for (int v = 0; v < KEY_VECTORS; v++)
        for (int r = 0; r < NARROW_REGIONS; r++) {
            vp k = vp_load(keys[r * CSA_REGION + t] + v * LANES);
            for (int line = v; line < CSA_KV_SIZE * 2 / 64; line += KEY_VECTORS)
                attend_ask(row, next[r * CSA_REGION + t], line);
            for (int h = 0; h < 4; h++)
                acc[r * 4 + h] = vf_dot(acc[r * 4 + h], k, query[v * 4 + h]);
        }
    return vf_sums(acc);
}

/* Turns logits into pairs of weights; updates max and weight of the quad and sets the factors for acc. */
static inline void narrow_softmax(attend_sums *s, int quad, const int *tokens, vf *logits, float *factor,
                                  uint32_t (*pairs)[LANES])
{
    float lanes[LANES], base[LANES];
    uint32_t seen[LANES] = {0};
    vf max = vf_set1(-INFINITY), sum = vf_set1(0);
    bool all = true;
    for (int r = 0; r < NARROW_REGIONS; r++)
        all = all && tokens[r] == CSA_REGION;
    for (int t = 0; t < CSA_REGION; t++) {
        for (int i = 0; !all && i < LANES; i++)
            seen[i] = t < tokens[i / 4] ? UINT32_MAX : 0;
        logits[t] = all ? logits[t] : vf_choose(vi_load(seen), logits[t], vf_set1(-INFINITY));
        max = vf_max(logits[t], max);
    }
    vf_store(lanes, max);
    for (int h = 0; h < 4; h++) {
        float old = s->max[quad * 4 + h], largest = old;
        for (int r = 0; r < NARROW_REGIONS; r++)
            largest = lanes[r * 4 + h] > largest ? lanes[r * 4 + h] : largest;
        s->max[quad * 4 + h] = largest;
        float subtracted = largest == -INFINITY ? 0 : largest;
        factor[h] = old - subtracted;
        for (int r = 0; r < NARROW_REGIONS; r++)
            base[r * 4 + h] = subtracted;
    }
    for (int h = 4; h < LANES; h++)
        factor[h] = 0;
    vf_store(factor, vf_exp2(vf_load(factor)));
    for (int t = 0; t < CSA_REGION; t += 2) {
        vf even = vf_exp2(logits[t] - vf_load(base)), odd = vf_exp2(logits[t + 1] - vf_load(base));
        sum = sum + (even + odd);
        vi_store(pairs[t / 2], attend_pair(even, odd));
    }
    vf_store(lanes, sum);
    for (int h = 0; h < 4; h++) {
        float total = s->weight[quad * 4 + h] * factor[h];
        for (int r = 0; r < NARROW_REGIONS; r++)
            total += lanes[r * 4 + h];
        s->weight[quad * 4 + h] = total;
    }
}

/* Adds NARROW_REGIONS regions' values to two heads of a quad. */
static inline void narrow_values(float *acc, const float *factor, const uint32_t (*values)[CSA_HEAD_SIZE],
                                 uint32_t (*pairs)[LANES], int h)
{
    for (int d = 0; d < CSA_HEAD_SIZE; d += NARROW_VECTORS * LANES) {
        vf sum[2][NARROW_VECTORS];
        for (int i = 0; i < 2; i++)
            for (int v = 0; v < NARROW_VECTORS; v++)
                sum[i][v] = vf_load(acc + (h + i) * CSA_HEAD_SIZE + d + v * LANES) * factor[h + i];
        for (int r = 0; r < NARROW_REGIONS; r++)
            for (int pair = 0; pair < CSA_REGION / 2; pair++) {
                vp first = vp_set1(pairs[pair][r * 4 + h]), second = vp_set1(pairs[pair][r * 4 + h + 1]);
                for (int v = 0; v < NARROW_VECTORS; v++) {
                    vp x = vp_load(values[r * CSA_REGION / 2 + pair] + d + v * LANES);
                    sum[0][v] = vf_dot(sum[0][v], first, x);
                    sum[1][v] = vf_dot(sum[1][v], second, x);
                }
            }
        for (int i = 0; i < 2; i++)
            for (int v = 0; v < NARROW_VECTORS; v++)
                vf_store(acc + (h + i) * CSA_HEAD_SIZE + d + v * LANES, sum[i][v]);
    }
}

static void narrow_tile(const attend_row *row, const attend_tile *tile, attend_sums *s)
{
    for (int r = 0; r < TILE && tile->tokens[r]; r += NARROW_REGIONS)
        for (int quad = 0; quad * 4 < row->heads; quad++) {
            vf logits[CSA_REGION];
            float factor[LANES], *acc = s->acc + quad * 4 * CSA_HEAD_SIZE;
            uint32_t pairs[CSA_REGION / 2][LANES];
            const vp *query = row->query + quad * KEY_VECTORS * 4;
            for (int t = 0; t < CSA_REGION; t++)
                logits[t] = narrow_logits(row, query, (const uint32_t(*)[PAIRS])tile->keys + r * CSA_REGION,
                                          tile->next + r * CSA_REGION, t) *
                            row->scale;
            narrow_softmax(s, quad, tile->tokens + r, logits, factor, pairs);
            narrow_values(acc, factor, tile->values + r * CSA_REGION / 2, pairs, 0);
            if (row->heads - quad * 4 > 2)
                narrow_values(acc, factor, tile->values + r * CSA_REGION / 2, pairs, 2);
        }
}

/* ---- Units and their tree ----------------------------------------------------------------------- */

static bool attend_is_wide(const attend_row *row)
{
    return row->heads > 8;
}

static void attend_clear(attend_sums *s)
{
    memset(s, 0, sizeof *s);
    for (int h = 0; h < CSA_MAX_HEADS; h++)
        s->max[h] = -INFINITY;
}

/* The regions among the list's entries [first, end) that contribute tokens. */
static int attend_list(const attend_row *row, int first, int end, attend_region *regions)
{
    const csa_tensor *kv = &row->args->cache->kv;
    unsigned shift = (unsigned)__builtin_ctzll((unsigned long long)kv->shape[2]);
    int count = 0;
    for (int i = first; i < end && i < row->count; i++) {
        int64_t region = row->entries[i];
        if (region < 0 || region > row->last)
            continue;
        int64_t token = region * CSA_REGION;
        int64_t block =
            csa_mapped_block(&row->args->tokens->block_table, row->owner, token >> shift, kv->shape[0]);
        if (block < 0)
            continue;
        regions[count].kv = csa_at(kv, block, row->group, token & (kv->shape[2] - 1));
        regions[count++].tokens = region == row->last ? row->last_tokens : CSA_REGION;
    }
    return count;
}

static void attend_unit(const attend_row *row, int unit, attend_sums *s)
{
    attend_tile tile;
    attend_region regions[UNIT + TILE]; /* and those that follow, to ask for */
    int count = attend_list(row, unit * UNIT, (unit + 1) * UNIT, regions);
    int listed = count + attend_list(row, (unit + 1) * UNIT, (unit + 1) * UNIT + TILE, regions + count);
    attend_clear(s);
    s->first = unit;
    s->units = 1;
    s->any = count > 0;
    for (int i = 0; i < count; i += TILE) {
        attend_load(row, regions + i, count - i, listed - i, &tile);
        if (attend_is_wide(row))
            wide_tile(row, &tile, s);
        else
            narrow_tile(row, &tile, s);
    }
}

/* a = a and b, which stand for neighbouring regions. */
static void attend_join(const attend_row *row, attend_sums *a, const attend_sums *b)
{
    a->units += b->units;
    a->any = a->any || b->any;
    float factor_a[CSA_MAX_HEADS], factor_b[CSA_MAX_HEADS];
    for (int h = 0; h < CSA_MAX_HEADS; h += LANES) {
        vf max = vf_max(vf_load(a->max + h), vf_load(b->max + h)), base = attend_base(max);
        vf x = vf_exp2(vf_load(a->max + h) - base), y = vf_exp2(vf_load(b->max + h) - base);
        vf_store(a->max + h, max);
        vf_store(a->weight + h, vf_load(a->weight + h) * x + vf_load(b->weight + h) * y);
        vf_store(factor_a + h, x);
        vf_store(factor_b + h, y);
    }
    bool wide = attend_is_wide(row);
    int end = wide ? CSA_MAX_HEADS * CSA_HEAD_SIZE : (int)row->heads * CSA_HEAD_SIZE;
    for (int i = 0; i < end; i += LANES) {
        vf x = wide ? vf_load(factor_a + i % CSA_MAX_HEADS) : vf_set1(factor_a[i / CSA_HEAD_SIZE]);
        vf y = wide ? vf_load(factor_b + i % CSA_MAX_HEADS) : vf_set1(factor_b[i / CSA_HEAD_SIZE]);
        vf_store(a->acc + i, vf_load(a->acc + i) * x + vf_load(b->acc + i) * y);
    }
}

/* Neighbouring sums that wait to be joined, left to right. */
typedef struct attend_tree {
    int depth;
    attend_sums sums[TREE_LEVELS];
} attend_tree;

/* Joins from the right what the fixed tree joins: neighbours of one size, the left one at a multiple of twice
 * that. all: also what is left when a row is complete. */
static void attend_settle(const attend_row *row, attend_tree *tree, bool all)
{
    for (; tree->depth > 1; tree->depth--) {
        attend_sums *left = &tree->sums[tree->depth - 2], *right = left + 1;
        if (!all && (left->units != right->units || left->first % (2 * left->units) != 0))
            return;
        attend_join(row, left, right);
    }
}

static void attend_units(const attend_row *row, int first, int end, attend_tree *tree)
{
    tree->depth = 0;
    for (int unit = first; unit < end; unit++) {
        attend_unit(row, unit, &tree->sums[tree->depth++]);
        attend_settle(row, tree, false);
    }
}

/* ---- Rows --------------------------------------------------------------------------------------- */

/* Reads where a row stands; count is 0 for an inactive one. */
static void attend_place(attend_row *row, const csa_attend_args *a, int64_t index)
{
    int64_t groups = a->query.shape[1], columns = a->selected.shape[1];
    row->args = a;
    row->token = index / groups;
    row->group = index % groups;
    row->heads = a->query.shape[2];
    row->owner = csa_token_owner(a->tokens, row->token);
    bool active = a->rows ? csa_bool(&a->rows->active, index) : csa_token_active(a->tokens, row->token);
    int64_t position =
        a->rows ? csa_i64(&a->rows->positions, index) : csa_token_position(a->tokens, row->token);
    row->last = active && position >= 0 ? position / CSA_REGION : -1;
    row->last_tokens = (int)(position % CSA_REGION) + 1;
    row->count = (int)(row->last < columns ? row->last + 1 : columns);
    row->entries = (const int64_t *)csa_at(&a->selected, index, 0, 0) + (columns - row->count);
}

/* What computing needs beyond that. */
static void attend_start(attend_row *row)
{
    const csa_tensor *kv = &row->args->cache->kv;
    row->token_bytes = kv->stride[2] * csa_itemsize(kv->dtype);
    row->row_bytes = CSA_KV_SIZE * csa_itemsize(kv->dtype);
    row->scale = row->args->scale * 0x1.715476p0F; /* log2(e) */
    if (kv->dtype == CSA_E4M3 && row->args->cache->k_scale)
        row->scale *= *row->args->cache->k_scale;
    if (attend_is_wide(row))
        wide_query(row);
    else
        narrow_query(row);
}

static int attend_unit_count(const attend_row *row)
{
    return (row->count + UNIT - 1) / UNIT;
}

/* Weighted values over the sum of weights, times v_scale, gated. */
static void attend_head(const attend_row *row, const attend_sums *s, int64_t head)
{
    const csa_attend_args *a = row->args;
    bool wide = attend_is_wide(row), coded = a->cache->kv.dtype == CSA_E4M3, gated = csa_present(&a->gate);
    float v_scale = coded && a->cache->v_scale ? *a->cache->v_scale : 1, sigmoid = 1;
    float values[CSA_HEAD_SIZE];
    for (int d = 0; d < CSA_HEAD_SIZE; d++)
        values[d] = wide ? s->acc[d * CSA_MAX_HEADS + head] : s->acc[head * CSA_HEAD_SIZE + d];
    if (gated)
        sigmoid = csa_gate_factor(*(const uint16_t *)csa_at(&a->gate, row->token, row->group, head));
    uint16_t *out = csa_at(&a->out, row->token, row->group, head);
    for (int d = 0; d < CSA_HEAD_SIZE; d += LANES) {
        vf x = vf_load(values + d) / vf_set1(s->weight[head]) * vf_set1(v_scale);
        vf_store_bf16(out + d, gated ? vf_round_bf16(x) * vf_set1(sigmoid) : x);
    }
    if (csa_present(&a->lse))
        *(float *)csa_at(&a->lse, row->token, row->group, head) =
            (float)((double)s->max[head] * 0x1.62e42fefa39efp-1 + log((double)s->weight[head]));
}

static void attend_nothing(const attend_row *row)
{
    for (int64_t head = 0; head < row->heads; head++) {
        memset(csa_at(&row->args->out, row->token, row->group, head), 0, CSA_HEAD_SIZE * sizeof(uint16_t));
        if (csa_present(&row->args->lse))
            *(float *)csa_at(&row->args->lse, row->token, row->group, head) = -INFINITY;
    }
}

/* Joins what is left of the tree and writes the row. */
static void attend_finish(const attend_row *row, attend_tree *tree)
{
    attend_settle(row, tree, true);
    if (tree->depth == 0 || !tree->sums[0].any) {
        attend_nothing(row);
        return;
    }
    for (int64_t head = 0; head < row->heads; head++)
        attend_head(row, &tree->sums[0], head);
}

static void attend_whole_row(void *data, int64_t index)
{
    attend_row row;
    attend_tree tree;
    attend_place(&row, data, index);
    attend_start(&row);
    attend_units(&row, 0, attend_unit_count(&row), &tree);
    attend_finish(&row, &tree);
}

/* ---- Shares of all rows' units ------------------------------------------------------------------ */

/* What shares know of rows they do not hold alone: the first and the last row of each. */
typedef struct attend_part {
    int64_t row; /* -1: none */
    attend_tree tree;
} attend_part;

typedef struct attend_work {
    const csa_attend_args *args;
    int64_t units, rows, shares; /* units: of a row, at most */
    attend_part *parts;          /* two a share */
} attend_work;

static int64_t attend_cut(const attend_work *w, int64_t share)
{
    return w->units * w->rows / w->shares * share + w->units * w->rows % w->shares * share / w->shares;
}

/* Units [first, end) of a row; a part of a row goes to `part`. */
static void attend_some(const attend_work *w, int64_t index, int64_t first, int64_t end, attend_part *part)
{
    attend_row row;
    attend_tree whole;
    attend_place(&row, w->args, index);
    int units = attend_unit_count(&row);
    attend_tree *tree = part ? &part->tree : &whole;
    attend_start(&row);
    attend_units(&row, (int)first, end < units ? (int)end : units, tree);
    if (part)
        part->row = index;
    else
        attend_finish(&row, tree);
}

static void attend_share(void *data, int64_t share)
{
    const attend_work *w = data;
    int64_t from = attend_cut(w, share), to = attend_cut(w, share + 1);
    attend_part *part = w->parts + 2 * share;
    part[0].row = part[1].row = -1;
    while (from < to) {
        int64_t index = from / w->units, first = from % w->units;
        int64_t end = to - index * w->units < w->units ? to - index * w->units : w->units;
        bool whole = first == 0 && end == w->units;
        attend_some(w, index, first, end, whole ? NULL : part);
        part += whole ? 0 : 1;
        from = index * w->units + end;
    }
}

/* Joins a row's parts, which the shares have left in order. Rows that one share held alone are done. */
static void attend_collect(void *data, int64_t index)
{
    const attend_work *w = data;
    attend_row row;
    attend_tree tree = {.depth = 0};
    bool any = false;
    for (int64_t i = 0; i < 2 * w->shares; i++)
        if (w->parts[i].row == index) {
            if (!any)
                attend_place(&row, w->args, index);
            any = true;
            for (int n = 0; n < w->parts[i].tree.depth; n++) {
                tree.sums[tree.depth++] = w->parts[i].tree.sums[n];
                attend_settle(&row, &tree, false);
            }
        }
    if (any)
        attend_finish(&row, &tree);
}

static csa_status attend(const csa_context *context, const csa_attend_args *args)
{
    attend_work w = {.args = args, .units = (args->selected.shape[1] + UNIT - 1) / UNIT};
    w.rows = args->query.shape[0] * args->query.shape[1];
    w.shares = context->threads;
    w.parts = w.shares > 1 && w.rows < 8 * w.shares ? csa_take_scratch(context) : NULL;
    if (!w.parts)
        return csa_parallel(context, w.rows, attend_whole_row, (void *)args);
    csa_status status = csa_parallel(context, w.shares, attend_share, &w);
    if (status == CSA_OK)
        status = csa_parallel(context, w.rows, attend_collect, &w);
    csa_return_scratch(context);
    return status;
}
