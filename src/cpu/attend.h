/*
 * Section 6: attention to the selected regions.
 *
 * A row's list is folded in units of 16 entries, counted from its first live one; the units' sums (largest
 * logit, sum of weights, weighted values) join in a fixed binary tree, so that units may be computed anywhere:
 * all units of all rows are cut into equal shares, and what a share knows of a row that it does not hold alone
 * waits in the context's scratch. Within a unit all logits come first, tile by tile, then one softmax in base
 * 2, then all values. Weights are rounded to bf16 for the product with V, their sum is not.
 *
 * Two layouts of logits: `wide` (9 to 16 heads) has heads in lanes and broadcasts pairs of K's values, so that
 * nothing is ever summed across lanes; `narrow` (1 to 8 heads) has K's values in lanes. Weighted values always
 * have V's dimensions in lanes. All of V, and K but for `wide`, is read where it lies in the cache.
 *
 * SPDX-License-Identifier: Apache-2.0
 */

enum {
    HEAD_LANES = CSA_MAX_HEADS / LANES, /* vectors that hold 16 heads */
    UNIT = 16,                          /* regions of a unit */
    UNIT_TOKENS = UNIT * CSA_REGION,
    TILE = 4, /* regions whose keys are at hand at once */
    TILE_TOKENS = TILE * CSA_REGION,
    PAIRS = CSA_HEAD_SIZE / 2,                 /* pairs of values of a key */
    KEY_VECTORS = CSA_HEAD_SIZE / (2 * LANES), /* of pairs */
    VALUE_VECTORS = CSA_HEAD_SIZE / LANES,     /* of floats */
    ASK_SHARE = 2 * CSA_HEAD_SIZE * 2 / 64, /* a row's lines at most: one for each of a tile's regions a step */
    TREE_LEVELS = 14                        /* parts of a row's 65 units that may wait at once */
};

#define ATTEND_LINE __attribute__((aligned(64))) /* a vector across two cache lines costs two accesses */

/* The sums over some units, logits in base 2. acc: dimensions in the order of attend_position. */
typedef struct attend_sums {
    int first, units;
    bool any; /* did a token contribute? */
    ATTEND_LINE float max[CSA_MAX_HEADS], weight[CSA_MAX_HEADS];
    ATTEND_LINE float acc[CSA_MAX_HEADS][CSA_HEAD_SIZE];
} attend_sums;

typedef struct attend_row {
    const csa_attend_args *args;
    int64_t token, group, heads, owner, last; /* last: region of the row's position */
    const int64_t *entries;                   /* of its list that are live */
    int count, last_tokens;                   /* of these; tokens of the last region */
    int64_t token_bytes;
    int64_t part_bytes;           /* of a token's key, and of its values */
    int lines;                    /* cache lines of both */
    float scale;                  /* of dots, to base 2 */
    vp query[PAIRS * HEAD_LANES]; /* wide: [pair][heads]; narrow: [quad][vector][head of quad] */
} attend_row;

/* What is asked for next. */
typedef struct attend_ahead {
    const char *const *regions; /* of a tile */
    int64_t at;                 /* from the start of each */
    int token, line, due;
} attend_ahead;

/* The regions of a unit that contribute tokens. Past the last one there are no tokens, but an address that may
 * be asked for. */
typedef struct attend_list {
    int count, tokens[UNIT];
    const char *at[UNIT];
} attend_list;

/* A unit under way. Rows are in bf16, in place or decoded, and zeros for a token that is not seen. */
typedef struct attend_work {
    attend_list list, next; /* of this unit, of the one that follows */
    attend_ahead ahead;     /* in `next` */
    int regions;            /* rounded up to whole tiles */
    const uint16_t *keys[TILE_TOKENS], *values[UNIT_TOKENS];
    ATTEND_LINE float logits[UNIT_TOKENS * CSA_MAX_HEADS];
    ATTEND_LINE uint32_t weights[UNIT_TOKENS / 2 * CSA_MAX_HEADS]; /* pairs (even token, odd token) */
    ATTEND_LINE uint16_t key_room[TILE_TOKENS][CSA_HEAD_SIZE], value_room[UNIT_TOKENS][CSA_HEAD_SIZE];
} attend_work;

ATTEND_LINE static const uint16_t attend_zeros[CSA_HEAD_SIZE];

static bool attend_is_wide(const attend_row *row)
{
    return row->heads > 8;
}

/* ---- Loading ------------------------------------------------------------------------------------ */

static void attend_decode(const uint8_t *codes, uint16_t *to)
{
    for (int i = 0; i < CSA_HEAD_SIZE; i += 4 * LANES) {
        vi first, second;
        vp_decode_in_order(codes + i, &first, &second);
        vi_store(to + i, first);
        vi_store(to + i + 2 * LANES, second);
    }
}

/* A token's key (part 0) or values (part 1): in place, decoded into `room`, or zeros. */
static inline const uint16_t *attend_token(const attend_row *row, const attend_work *w, int token, int part,
                                           uint16_t *room)
{
    int r = token / CSA_REGION, t = token % CSA_REGION;
    if (t >= w->list.tokens[r])
        return attend_zeros;
    const char *at = w->list.at[r] + t * row->token_bytes + part * row->part_bytes;
    if (row->part_bytes == sizeof attend_zeros)
        return (const void *)at;
    attend_decode((const void *)at, room);
    return room;
}

static void attend_load_keys(const attend_row *row, attend_work *w, int first)
{
    for (int i = 0; i < TILE_TOKENS; i++)
        w->keys[i] = attend_token(row, w, first + i, 0, w->key_room[i]);
}

static void attend_load_values(const attend_row *row, attend_work *w)
{
    for (int i = 0; i < w->regions * CSA_REGION; i++)
        w->values[i] = attend_token(row, w, i, 1, w->value_room[i]);
}

/* Asks for two lines of each of TILE regions, lines / share times in two calls: to be called between
 * computations, for requests that pile up are dropped. Several streams are answered faster than one, and
 * requests into L1 faster than those into L2, although not all of it stays in L1. */
static inline void attend_ask(attend_ahead *ahead, const attend_row *row, int share)
{
    for (ahead->due += row->lines; ahead->due >= 2 * share; ahead->due -= 2 * share) {
        for (int r = 0; r < TILE; r++) {
            __builtin_prefetch(ahead->regions[r] + ahead->at, 0, 3);
            __builtin_prefetch(ahead->regions[r] + ahead->at + 64, 0, 3);
        }
        ahead->at += 128;
        ahead->line += 2;
        if (ahead->line < row->lines)
            continue;
        ahead->line = 0;
        ahead->at += row->token_bytes - row->lines * 64;
        if (++ahead->token < CSA_REGION)
            continue;
        ahead->token = 0;
        ahead->at = 0;
        ahead->regions += TILE;
    }
}

/* ---- Softmax ------------------------------------------------------------------------------------ */

/* What is subtracted from logits: the largest; 0 where that is -inf, so that weights become 0. */
static inline vf attend_base(vf max)
{
    return vf_choose((vi)(max == vf_set1(-INFINITY)), vf_set1(0), max);
}

/* Turns n vectors of logits, two tokens after each other, into pairs of weights, lane by lane, and returns
 * their sum. */
static inline vf attend_weigh(const float *logits, int n, int stride, vf base, uint32_t *pairs)
{
    vf sum = vf_set1(0);
    for (int i = 0; i < n; i += 2) {
        vf even = vf_exp2(vf_load(logits + i * stride) - base);
        vf odd = vf_exp2(vf_load(logits + (i + 1) * stride) - base);
        sum = sum + (even + odd);
        vi_store(pairs + i / 2 * stride, vi_bf16_pairs(even, odd));
    }
    return sum;
}

/* ---- Wide --------------------------------------------------------------------------------------- */

enum { WIDE_TOKENS = 16 / HEAD_LANES }; /* whose logits are computed at once: as many chains hide the latency */

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

/* logits[token][heads] of WIDE_TOKENS tokens. */
static inline void wide_logits(const attend_row *row, attend_work *w, const uint16_t *const *rows,
                               float *logits)
{
    attend_ahead ahead = w->ahead;
    ATTEND_LINE uint32_t keys[WIDE_TOKENS][PAIRS]; /* side by side: 16 addresses would not fit in registers */
    vf acc[WIDE_TOKENS][HEAD_LANES];
    for (int i = 0; i < WIDE_TOKENS; i++) {
        memcpy(keys[i], rows[i], sizeof keys[i]);
        for (int h = 0; h < HEAD_LANES; h++)
            acc[i][h] = vf_set1(0);
    }
    for (int pair = 0; pair < PAIRS; pair++) {
        if (pair % (64 / WIDE_TOKENS) == 0)
            attend_ask(&ahead, row, ASK_SHARE);
        for (int i = 0; i < WIDE_TOKENS; i++)
            for (int h = 0; h < HEAD_LANES; h++)
                acc[i][h] = vf_dot(acc[i][h], row->query[pair * HEAD_LANES + h], vp_set1(keys[i][pair]));
    }
    w->ahead = ahead;
    for (int i = 0; i < WIDE_TOKENS; i++)
        for (int h = 0; h < HEAD_LANES; h++)
            vf_store(logits + i * CSA_MAX_HEADS + h * LANES, acc[i][h] * row->scale);
}

static void wide_tile(const attend_row *row, attend_work *w, int first)
{
    for (int i = 0; i < TILE_TOKENS; i += WIDE_TOKENS)
        wide_logits(row, w, w->keys + i, w->logits + (first + i) * CSA_MAX_HEADS);
}

static void wide_softmax(attend_sums *s, attend_work *w)
{
    int tokens = w->regions * CSA_REGION;
    for (int h = 0; h < CSA_MAX_HEADS; h += LANES) {
        vf max = vf_set1(-INFINITY);
        for (int i = 0; i < tokens; i++) {
            float *logits = w->logits + i * CSA_MAX_HEADS + h;
            if (i % CSA_REGION >= w->list.tokens[i / CSA_REGION])
                vf_store(logits, vf_set1(-INFINITY));
            max = vf_max(vf_load(logits), max);
        }
        vf_store(s->max + h, max);
        vf_store(s->weight + h,
                 attend_weigh(w->logits + h, tokens, CSA_MAX_HEADS, attend_base(max), w->weights + h));
    }
}

/* ---- Narrow ------------------------------------------------------------------------------------- */

enum { NARROW_REGIONS = LANES / 4 }; /* of one transpose */

static void narrow_query(attend_row *row)
{
    memset(row->query, 0, sizeof row->query);
    for (int64_t head = 0; head < row->heads; head++)
        for (int v = 0; v < KEY_VECTORS; v++)
            row->query[(head / 4 * KEY_VECTORS + v) * 4 + head % 4] = vp_load(
                (const uint16_t *)csa_at(&row->args->query, row->token, row->group, head) + v * 2 * LANES);
}

/* Logits of one token of each of NARROW_REGIONS regions, lane region * 4 + head of the quad; the first one is
 * the tile's token `first`. */
static inline vf narrow_logits(const attend_row *row, attend_work *w, int quad, int first)
{
    const vp *query = row->query + quad * KEY_VECTORS * 4;
    attend_ahead ahead = w->ahead;
    vf acc[LANES];
    for (int i = 0; i < LANES; i++)
        acc[i] = vf_set1(0);
    for (int v = 0; v < KEY_VECTORS; v++) {
        if (quad == 0 && v % (HEAD_LANES * HEAD_LANES) == 0)
            attend_ask(&ahead, row, ASK_SHARE);
        for (int r = 0; r < NARROW_REGIONS; r++) {
            vp k = vp_load(w->keys[first + r * CSA_REGION] + v * 2 * LANES);
            for (int h = 0; h < 4; h++)
                acc[r * 4 + h] = vf_dot(acc[r * 4 + h], k, query[v * 4 + h]);
        }
    }
    w->ahead = ahead;
    return vf_sums(acc) * row->scale;
}

static float *narrow_at(attend_work *w, int quad, int region)
{
    return w->logits + (quad * UNIT + region) * CSA_REGION * 4;
}

static void narrow_tile(const attend_row *row, attend_work *w, int first)
{
    for (int r = 0; r < TILE; r += NARROW_REGIONS)
        for (int quad = 0; quad * 4 < row->heads; quad++)
            for (int t = 0; t < CSA_REGION; t++)
                vf_store(narrow_at(w, quad, first / CSA_REGION + r) + t * LANES,
                         narrow_logits(row, w, quad, r * CSA_REGION + t));
}

/* Logits of a region's tokens that are not seen, lanes `lane` to lane + 3, become -inf. */
static void narrow_hide(float *logits, int lane, int seen)
{
    for (int t = seen; t < CSA_REGION; t++)
        for (int h = 0; h < 4; h++)
            logits[t * LANES + lane + h] = -INFINITY;
}

static void narrow_softmax(attend_sums *s, attend_work *w, int quad)
{
    ATTEND_LINE float lanes[LANES], base[LANES], *logits = narrow_at(w, quad, 0);
    int vectors = w->regions / NARROW_REGIONS * CSA_REGION;
    vf max = vf_set1(-INFINITY);
    for (int r = 0; r < w->regions; r++) {
        int within = r % NARROW_REGIONS;
        narrow_hide(narrow_at(w, quad, r - within), within * 4, w->list.tokens[r]);
    }
    for (int i = 0; i < vectors; i++)
        max = vf_max(vf_load(logits + i * LANES), max);
    vf_store(lanes, max);
    for (int h = 0; h < 4; h++) {
        float largest = lanes[h];
        for (int r = 1; r < NARROW_REGIONS; r++)
            largest = lanes[r * 4 + h] > largest ? lanes[r * 4 + h] : largest;
        s->max[quad * 4 + h] = largest;
        for (int r = 0; r < NARROW_REGIONS; r++)
            base[r * 4 + h] = largest == -INFINITY ? 0 : largest;
    }
    vf_store(lanes, attend_weigh(logits, vectors, LANES, vf_load(base), w->weights + (logits - w->logits) / 2));
    for (int h = 0; h < 4; h++) {
        float total = lanes[h];
        for (int r = 1; r < NARROW_REGIONS; r++)
            total += lanes[r * 4 + h];
        s->weight[quad * 4 + h] = total;
    }
}

/* ---- Weighted values: dimensions in lanes, for both layouts ------------------------------------- */

enum { SUM_VECTORS = LANES == 16 ? 6 : 2 }; /* of each of four heads' sums, which stay in registers */

/* Where a dimension stands once vi_interleave has paired two tokens' values. */
static int attend_position(int d)
{
    int within = d % (2 * LANES);
    return d - within + within % 8 / 4 * LANES + within / 8 * 4 + within % 4;
}

/* SUM_VECTORS vectors, from dimension d on, of a quad's weighted values. `passes` of them ask for the second
 * half of the next unit. */
static inline void attend_values(const attend_row *row, attend_work *w, int quad, int d, int passes,
                                 float (*to)[CSA_HEAD_SIZE])
{
    bool wide = attend_is_wide(row);
    attend_ahead ahead = w->ahead;
    vf acc[4][SUM_VECTORS];
    for (int h = 0; h < 4; h++)
        for (int v = 0; v < SUM_VECTORS; v++)
            acc[h][v] = vf_set1(0);
    for (int r = 0; r < w->regions; r++) {
        attend_ask(&ahead, row, passes);
        int within = r % NARROW_REGIONS, step = wide ? CSA_MAX_HEADS : LANES;
        const uint32_t *weights =
            w->weights + (wide ? r * (CSA_REGION / 2) * CSA_MAX_HEADS + quad * 4
                               : (quad * UNIT + r - within) * CSA_REGION / 2 * 4 + within * 4);
        for (int t = r * CSA_REGION; t < (r + 1) * CSA_REGION; t += 2, weights += step) {
            const uint16_t *even = w->values[t] + d, *odd = w->values[t + 1] + d;
            for (int v = 0; v < SUM_VECTORS; v += 2) {
                vi first, second;
                vi_interleave(vi_load(even + v * LANES), vi_load(odd + v * LANES), &first, &second);
                for (int h = 0; h < 4; h++) {
                    acc[h][v] = vf_dot(acc[h][v], vp_set1(weights[h]), vp_of(first));
                    acc[h][v + 1] = vf_dot(acc[h][v + 1], vp_set1(weights[h]), vp_of(second));
                }
            }
        }
    }
    w->ahead = ahead;
    for (int h = 0; h < 4; h++)
        for (int v = 0; v < SUM_VECTORS; v++)
            vf_store(to[h] + d + v * LANES, acc[h][v]);
}

static void attend_sum_values(const attend_row *row, attend_work *w, attend_sums *s)
{
    int quads = (int)(row->heads + 3) / 4, passes = quads * (VALUE_VECTORS / SUM_VECTORS);
    for (int d = 0; d < CSA_HEAD_SIZE; d += SUM_VECTORS * LANES)
        for (int quad = 0; quad < quads; quad++)
            attend_values(row, w, quad, d, passes, s->acc + quad * 4);
}

/* ---- Units and their tree ----------------------------------------------------------------------- */

/* No token yet; the sums of values are written in any case. */
static void attend_clear(attend_sums *s)
{
    for (int h = 0; h < CSA_MAX_HEADS; h++) {
        s->max[h] = -INFINITY;
        s->weight[h] = 0;
    }
}

static void attend_find(const attend_row *row, int unit, attend_list *list)
{
    const csa_tensor *kv = &row->args->cache->kv;
    unsigned shift = (unsigned)__builtin_ctzll((unsigned long long)kv->shape[2]);
    *list = (attend_list){.count = 0};
    for (int i = unit * UNIT; i < (unit + 1) * UNIT && i < row->count; i++) {
        int64_t region = row->entries[i];
        if (region < 0 || region > row->last)
            continue;
        int64_t token = region * CSA_REGION;
        int64_t block =
            csa_mapped_block(&row->args->tokens->block_table, row->owner, token >> shift, kv->shape[0]);
        if (block < 0)
            continue;
        list->at[list->count] = csa_at(kv, block, row->group, token & (kv->shape[2] - 1));
        list->tokens[list->count++] = region == row->last ? row->last_tokens : CSA_REGION;
    }
    for (int i = list->count; i < UNIT; i++)
        list->at[i] = (const char *)attend_zeros;
}

/* w->next is the unit's list, and becomes that of the one that follows. */
static void attend_unit(const attend_row *row, int unit, attend_work *w, attend_sums *s)
{
    w->list = w->next;
    attend_find(row, unit + 1, &w->next);
    w->ahead = (attend_ahead){.regions = w->next.at};
    w->regions = (w->list.count + TILE - 1) / TILE * TILE;
    attend_clear(s);
    s->first = unit;
    s->units = 1;
    s->any = w->list.count > 0;
    for (int first = 0; first < w->regions; first += TILE) {
        attend_load_keys(row, w, first * CSA_REGION);
        if (attend_is_wide(row))
            wide_tile(row, w, first * CSA_REGION);
        else
            narrow_tile(row, w, first * CSA_REGION);
    }
    if (attend_is_wide(row))
        wide_softmax(s, w);
    else
        for (int quad = 0; quad * 4 < row->heads; quad++)
            narrow_softmax(s, w, quad);
    attend_load_values(row, w);
    attend_sum_values(row, w, s);
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
    for (int64_t h = 0; h < row->heads; h++)
        for (int d = 0; d < CSA_HEAD_SIZE; d += LANES)
            vf_store(a->acc[h] + d,
                     vf_load(a->acc[h] + d) * factor_a[h] + vf_load(b->acc[h] + d) * factor_b[h]);
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
    attend_work w;
    tree->depth = 0;
    attend_find(row, first, &w.next);
    for (int unit = first; unit < end; unit++) {
        attend_unit(row, unit, &w, &tree->sums[tree->depth++]);
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
    row->part_bytes = CSA_HEAD_SIZE * csa_itemsize(kv->dtype);
    row->lines = (int)(2 * row->part_bytes / 64);
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
    bool coded = a->cache->kv.dtype == CSA_E4M3, gated = csa_present(&a->gate);
    float v_scale = coded && a->cache->v_scale ? *a->cache->v_scale : 1, sigmoid = 1;
    float values[CSA_HEAD_SIZE];
    for (int d = 0; d < CSA_HEAD_SIZE; d++)
        values[d] = s->acc[head][attend_position(d)];
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

typedef struct attend_shares {
    const csa_attend_args *args;
    int64_t units, rows, shares; /* units: of a row, at most */
    attend_part *parts;          /* two a share */
} attend_shares;

static int64_t attend_cut(const attend_shares *w, int64_t share)
{
    return w->units * w->rows / w->shares * share + w->units * w->rows % w->shares * share / w->shares;
}

/* Units [first, end) of a row; a part of a row goes to `part`. */
static void attend_some(const attend_shares *w, int64_t index, int64_t first, int64_t end, attend_part *part)
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
    const attend_shares *w = data;
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
    const attend_shares *w = data;
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
    attend_shares w = {.args = args, .units = (args->selected.shape[1] + UNIT - 1) / UNIT};
    w.rows = args->query.shape[0] * args->query.shape[1];
    w.shares = context->threads;
    char *scratch = w.shares > 1 && w.rows < 8 * w.shares ? csa_take_scratch(context) : NULL;
    w.parts = scratch ? (attend_part *)(scratch + (-(uintptr_t)scratch & 63)) : NULL;
    if (!w.parts)
        return csa_parallel(context, w.rows, attend_whole_row, (void *)args);
    csa_status status = csa_parallel(context, w.shares, attend_share, &w);
    if (status == CSA_OK)
        status = csa_parallel(context, w.rows, attend_collect, &w);
    csa_return_scratch(context);
    return status;
}
