/*
 * What a serving configuration reads, writes, computes and holds.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "cost.h"

/* Bytes and operations that do not follow from the sizes of csa.h. */
enum {
    BF16 = 2,
    FP32 = 4,
    VECTOR = CSA_SUMMARY_SIZE * BF16, /* an index key, or z */
    RING_ROW = CSA_RING_SIZE * BF16,
    ID = 8,                    /* an entry of a selection list */
    NORM_OPERATIONS = 4,       /* per value: square, add, times the norm, times the weight */
    LAYER_NORM_OPERATIONS = 7, /* two more sums, a subtraction, a multiply-add instead of a product */
    ROTATE_OPERATIONS = 3,     /* per value: two products, a sum */
    SUMMARY_OPERATIONS = 10,   /* per channel and token: section 3's loop */
    SOFTMAX_OPERATIONS = 4     /* per logit: scale, subtract, exponential, add */
};

/* What follows from the model and the step, for the stages below. */
typedef struct step {
    const cost_model *model;
    uint64_t requests, tokens; /* tokens of one request */
    uint64_t all_tokens, rows; /* of all requests; rows are (token, group) pairs */
    uint64_t first, last;      /* positions of a request's tokens: [first, last] */
    uint64_t ranked, seen;     /* regions ranked, and tokens selected, by one request's tokens in one group */
    uint64_t row_bytes;        /* of the cache */
    uint64_t index_heads, q_values; /* padded index heads; values of a row's query */
    bool prefill;
} step;

uint64_t cost_add(uint64_t a, uint64_t b)
{
    uint64_t sum;
    return __builtin_add_overflow(a, b, &sum) ? UINT64_MAX : sum;
}

uint64_t cost_mul(uint64_t a, uint64_t b)
{
    uint64_t product;
    return __builtin_mul_overflow(a, b, &product) ? UINT64_MAX : product;
}

static uint64_t subtract(uint64_t a, uint64_t b)
{
    return a == UINT64_MAX ? a : a - b;
}

static uint64_t minimum(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

/* The sums below run over positions [0, end). */

static uint64_t sum_of_regions(uint64_t end) /* of p / 8 */
{
    uint64_t regions = end / CSA_REGION;
    uint64_t full = regions ? cost_mul(CSA_REGION / 2, cost_mul(regions, regions - 1)) : 0;
    return cost_add(full, cost_mul(regions, end % CSA_REGION));
}

static uint64_t sum_of_ranked(uint64_t end, uint64_t topk) /* of p / 8 where that is more than topk */
{
    uint64_t unranked = minimum(end, (topk + 1) * CSA_REGION);
    return subtract(sum_of_regions(end), sum_of_regions(unranked));
}

static uint64_t sum_of_selected(uint64_t end, uint64_t topk) /* of min(topk, p / 8) * 8 + p % 8 + 1 */
{
    uint64_t regions = end / CSA_REGION, rest = end % CSA_REGION, all = minimum(end, topk * CSA_REGION);
    uint64_t historical = cost_add(sum_of_regions(all), cost_mul(end - all, topk));
    uint64_t own = cost_add(cost_mul(regions, CSA_REGION * (CSA_REGION + 1) / 2), rest * (rest + 1) / 2);
    return cost_add(cost_mul(historical, CSA_REGION), own);
}

static uint64_t sum_of_seen(uint64_t end) /* of p + 1 */
{
    return end % 2 ? cost_mul(end, end / 2 + 1) : cost_mul(end / 2, end + 1);
}

static step plan(const cost_model *model, int64_t requests, int64_t tokens, bool prefill)
{
    uint64_t end = (uint64_t)model->context, first = end - (uint64_t)tokens, topk = (uint64_t)model->topk;
    step s = {.model = model, .requests = (uint64_t)requests, .tokens = (uint64_t)tokens, .prefill = prefill};
    s.all_tokens = cost_mul(s.requests, s.tokens);
    s.rows = cost_mul(s.all_tokens, (uint64_t)model->groups);
    s.first = first;
    s.last = end - 1;
    s.ranked = subtract(sum_of_ranked(end, topk), sum_of_ranked(first, topk));
    s.seen = subtract(sum_of_selected(end, topk), sum_of_selected(first, topk));
    s.row_bytes = (uint64_t)(model->e4m3 ? CSA_KV_SIZE : CSA_KV_SIZE * BF16);
    s.index_heads = (uint64_t)cost_padded_heads(model);
    s.q_values = (uint64_t)model->heads * CSA_HEAD_SIZE;
    return s;
}

static cost prepare_cost(const step *s)
{
    uint64_t real = (uint64_t)s->model->index_heads, groups = (uint64_t)s->model->groups;
    uint64_t index_values = real * CSA_SUMMARY_SIZE, attention = s->q_values + CSA_HEAD_SIZE;
    /* Per row: queries, weights, key and value; per token: the index key and the two rows of the RoPE tables.
     */
    uint64_t row_in = (index_values + real + s->q_values + CSA_KV_SIZE) * BF16;
    uint64_t token_in = VECTOR + (uint64_t)(CSA_INDEX_ROTARY + CSA_HEAD_SIZE) * BF16;
    uint64_t row_out = s->index_heads * (CSA_SUMMARY_SIZE + FP32) + s->q_values * BF16;
    uint64_t row_work = attention * (NORM_OPERATIONS + ROTATE_OPERATIONS) + index_values * NORM_OPERATIONS +
                        real * (CSA_INDEX_ROTARY * ROTATE_OPERATIONS + 1);
    uint64_t key_work = CSA_SUMMARY_SIZE * LAYER_NORM_OPERATIONS + CSA_INDEX_ROTARY * ROTATE_OPERATIONS;
    return (cost){
        .read = cost_mul(s->all_tokens, groups * row_in + token_in),
        .written = cost_mul(s->rows, s->row_bytes),
        .between = cost_mul(s->all_tokens, groups * row_out + VECTOR),
        .operations = cost_mul(s->all_tokens, groups * row_work + key_work),
    };
}

/* Once per request: the begun region's rows come from the ring, the last rows go there. */
static cost prefill_ring(const step *s, uint64_t closed)
{
    uint64_t capacity = CSA_REGION - 2 + (uint64_t)s->model->query_len;
    return (cost){
        .read = closed ? cost_mul(s->requests, s->first % CSA_REGION * RING_ROW) : 0,
        .written = cost_mul(s->requests, cost_mul(minimum(s->tokens, capacity), RING_ROW)),
    };
}

/* One token of eight closes a region; decode does not store that one, verify does and reads it back. */
static cost decode_ring(const step *s)
{
    uint64_t rows = s->tokens > 1 ? CSA_REGION : CSA_REGION - 1;
    uint64_t bytes = cost_mul(s->all_tokens, rows * (RING_ROW / CSA_REGION));
    return (cost){.read = bytes, .written = bytes};
}

static cost summarize_cost(const step *s)
{
    uint64_t closed = (s->last + 1) / CSA_REGION - s->first / CSA_REGION;
    cost ring = s->prefill ? prefill_ring(s, closed) : decode_ring(s);
    uint64_t channels = s->prefill ? cost_mul(s->requests, cost_mul(closed, CSA_SUMMARY_SIZE))
                                   : cost_mul(s->all_tokens, CSA_SUMMARY_SIZE / CSA_REGION);
    return (cost){
        .read = cost_add(cost_mul(s->all_tokens, VECTOR), ring.read), /* z */
        .written = cost_add(channels, ring.written),
        .between = cost_mul(s->all_tokens, VECTOR), /* index keys */
        .operations = cost_mul(channels, CSA_REGION * SUMMARY_OPERATIONS + 1),
    };
}

static cost score_cost(const step *s)
{
    uint64_t real = (uint64_t)s->model->index_heads, groups = (uint64_t)s->model->groups;
    if (s->ranked == 0)
        return (cost){0}; /* every region is attended, whatever its score */
    uint64_t scores = cost_mul(cost_mul(s->requests, groups), s->ranked);
    return (cost){
        .read = cost_mul(s->requests, cost_mul(s->last / CSA_REGION, CSA_SUMMARY_SIZE)),
        .between = cost_add(cost_mul(s->rows, real * (CSA_SUMMARY_SIZE + FP32)), cost_mul(scores, FP32)),
        .operations = cost_mul(scores, real * (2 * CSA_SUMMARY_SIZE + 3)), /* dot, max, multiply-add */
    };
}

static uint64_t list_bytes(const step *s)
{
    uint64_t width = minimum((uint64_t)s->model->topk, s->last / CSA_REGION);
    return cost_mul(s->rows, ID * (width + 1));
}

/* A comparison per score is what no selection can do without. */
static cost select_cost(const step *s)
{
    uint64_t scores = cost_mul(cost_mul(s->requests, (uint64_t)s->model->groups), s->ranked);
    return (cost){.between = cost_add(cost_mul(scores, FP32), list_bytes(s)), .operations = scores};
}

/* q.k and the product with V, and what softmax adds, for `pairs` (row, token) pairs. */
static uint64_t attention_work(const step *s, uint64_t pairs)
{
    uint64_t per_head = 2 * CSA_KV_SIZE + SOFTMAX_OPERATIONS;
    return cost_add(cost_mul(pairs, (uint64_t)s->model->heads * per_head), cost_mul(s->rows, s->q_values));
}

static uint64_t table_bytes(const step *s)
{
    return cost_mul(s->requests, cost_mul(s->last / (uint64_t)s->model->block_size + 1, FP32));
}

static cost attend_cost(const step *s)
{
    uint64_t streams = cost_mul(s->requests, (uint64_t)s->model->groups); /* (request, group) pairs */
    uint64_t rows_read = cost_mul(streams, minimum(s->seen, s->last + 1));
    return (cost){
        .read = cost_add(cost_mul(rows_read, s->row_bytes), table_bytes(s)),
        .between = cost_add(list_bytes(s), cost_mul(s->rows, 2 * s->q_values * BF16)), /* query, out */
        .operations = attention_work(s, cost_mul(streams, s->seen)),
    };
}

static cost dense_cost(const step *s)
{
    uint64_t streams = cost_mul(s->requests, (uint64_t)s->model->groups);
    uint64_t seen = subtract(sum_of_seen(s->last + 1), sum_of_seen(s->first));
    return (cost){
        .read = cost_add(cost_mul(cost_mul(streams, s->last + 1), s->row_bytes), table_bytes(s)),
        .between = cost_mul(s->rows, 2 * s->q_values * BF16),
        .operations = attention_work(s, cost_mul(streams, seen)),
    };
}

static cost gate_cost(const step *s)
{
    uint64_t gates = cost_mul(s->rows, (uint64_t)s->model->heads);
    return (cost){
        .read = cost_mul(gates, BF16),
        .written = cost_mul(s->rows, s->q_values * BF16),
        .between = cost_mul(s->rows, s->q_values * BF16),
        .operations = cost_mul(gates, CSA_HEAD_SIZE + 3), /* sigmoid, products */
    };
}

static cost sum(const cost *costs, int first, int end)
{
    cost total = {0};
    for (int i = first; i < end; i++) {
        total.read = cost_add(total.read, costs[i].read);
        total.written = cost_add(total.written, costs[i].written);
        total.between = cost_add(total.between, costs[i].between);
        total.operations = cost_add(total.operations, costs[i].operations);
    }
    return total;
}

cost_step cost_of_step(const cost_model *model, int64_t requests, int64_t tokens, bool prefill)
{
    step s = plan(model, requests, tokens, prefill);
    cost_step result = {
        .stages = {[COST_PREPARE] = prepare_cost(&s),
                   [COST_SUMMARIZE] = summarize_cost(&s),
                   [COST_SCORE] = score_cost(&s),
                   [COST_SELECT] = select_cost(&s),
                   [COST_ATTEND] = attend_cost(&s),
                   [COST_GATE] = gate_cost(&s)},
        .dense = dense_cost(&s),
    };
    result.total = sum(result.stages, 0, COST_STAGES);
    result.sparse = sum(result.stages, COST_SUMMARIZE, COST_GATE);
    return result;
}

int64_t cost_regions(const cost_model *model)
{
    int64_t blocks = (model->context - 1) / model->block_size + 1;
    return blocks * (model->block_size / CSA_REGION);
}

int64_t cost_padded_heads(const cost_model *model)
{
    return model->index_heads == 2 || model->index_heads == 4 ? CSA_INDEX_HEADS : model->index_heads;
}

cost_memory cost_of_memory(const cost_model *model)
{
    uint64_t regions = (uint64_t)cost_regions(model), groups = (uint64_t)model->groups;
    uint64_t row = groups * (uint64_t)(model->e4m3 ? CSA_KV_SIZE : CSA_KV_SIZE * BF16);
    cost_memory m = {
        .kv = cost_mul(regions, CSA_REGION * row),
        .summaries = cost_mul(regions, CSA_SUMMARY_SIZE),
        .ring = cost_mul(CSA_REGION - 2 + (uint64_t)model->query_len, RING_ROW),
    };
    m.request = cost_add(m.kv, cost_add(m.summaries, m.ring));
    m.all = cost_mul(m.request, (uint64_t)model->batch);
    return m;
}

static bool fits(const cost *c)
{
    uint64_t most = INT64_MAX;
    return c->read <= most && c->written <= most && c->between <= most && c->operations <= most;
}

bool cost_exact(const cost_step *s)
{
    /* The total is at least each stage. */
    return fits(&s->total) && fits(&s->dense);
}

const char *cost_stage_name(int stage)
{
    static const char *const names[COST_STAGES] = {"prepare", "summarize", "score", "select", "attend", "gate"};
    return names[stage];
}
