/* SPDX-License-Identifier: Apache-2.0 */
#include "story.h"

/* ---- The story ---------------------------------------------------------------------------------- */

static csa_tensor drawn(story *s, const char *name, csa_dtype dtype, double scale, int n0, int n1, int n2,
                        int n3)
{
    int ndim = n3 >= 0 ? 4 : n2 >= 0 ? 3 : n1 >= 0 ? 2 : 1;
    csa_tensor t = arena_tensor(&s->memory, name, NULL, dtype, ndim, n0, n1, n2, n3);
    tensor_randomise(&t, &s->random, scale);
    return t;
}

/* Rows repeat after eight or sixteen positions, in each request by itself. */
static void repeat(story *s, csa_tensor *t)
{
    for (int64_t r = 0; r < s->shape.requests; r++)
        for (int64_t row = s->first[r] + 16; row < s->first[r + 1]; row++) {
            int64_t from = row - (random_chance(&s->random, 90) ? 8 : 16);
            csa_tensor to = tensor_slice(*t, row, 1), source = tensor_slice(*t, from, 1);
            tensor_copy(&to, &source);
        }
}

static void repeat_table(csa_tensor *table)
{
    for (int64_t position = CSA_REGION; position < table->shape[0]; position++) {
        csa_tensor to = tensor_slice(*table, position, 1),
                   from = tensor_slice(*table, position - CSA_REGION, 1);
        tensor_copy(&to, &from);
    }
}

static void draw_parameters(story *s)
{
    int positions = (int)s->longest;
    csa_dtype table = random_chance(&s->random, 50) ? CSA_F32 : CSA_BF16;
    s->index_query_norm = drawn(s, "index_query_norm", CSA_BF16, 1, CSA_SUMMARY_SIZE, -1, -1, -1);
    s->index_key_norm = drawn(s, "index_key_norm", CSA_BF16, 1, CSA_SUMMARY_SIZE, -1, -1, -1);
    s->index_key_bias = drawn(s, "index_key_bias", CSA_BF16, 1, CSA_SUMMARY_SIZE, -1, -1, -1);
    s->index_rope = drawn(s, "index_rope", table, 0.7, positions, CSA_INDEX_ROTARY, -1, -1);
    s->query_norm = drawn(s, "query_norm", CSA_BF16, 1, CSA_HEAD_SIZE, -1, -1, -1);
    s->key_norm = drawn(s, "key_norm", CSA_BF16, 1, CSA_HEAD_SIZE, -1, -1, -1);
    if (s->shape.rotary)
        s->rope = drawn(s, "rope", table, 0.7, positions, s->shape.rotary, -1, -1);
    s->scales = drawn(s, "scales", CSA_F32, 0, 2, -1, -1, -1);
    tensor_put(&s->scales, 0.3, 0, 0, 0, 0);
    tensor_put(&s->scales, 1.7, 1, 0, 0, 0);
    if (s->shape.ties)
        repeat_table(&s->index_rope);
}

void story_make(story *s, story_shape shape, uint64_t number)
{
    memset(s, 0, sizeof *s);
    s->shape = shape;
    s->random = random_of(number, 0x73746F7279);
    s->first = calloc((size_t)shape.requests + 1, sizeof *s->first);
    s->prefix = calloc((size_t)shape.requests, sizeof *s->prefix);
    for (int r = 0; r < shape.requests; r++) {
        s->prefix[r] = random_between(&s->random, 0, shape.prefix);
        if (shape.every_offset)
            s->prefix[r] = s->prefix[r] / CSA_REGION * CSA_REGION + r % CSA_REGION;
        int64_t length = s->prefix[r] + shape.tail;
        s->first[r + 1] = s->first[r] + length;
        s->longest = length > s->longest ? length : s->longest;
    }
    s->rows = s->first[shape.requests];
    int rows = (int)s->rows, tail = shape.requests * (int)shape.tail, g = shape.groups, h = shape.heads;
    s->index_key = drawn(s, "index_key", CSA_BF16, 1, rows, CSA_SUMMARY_SIZE, -1, -1);
    s->z = drawn(s, "z", CSA_BF16, 3, rows, CSA_SUMMARY_SIZE, -1, -1);
    s->key = drawn(s, "key", CSA_BF16, 1, rows, g, CSA_HEAD_SIZE, -1);
    s->value = drawn(s, "value", CSA_BF16, 1, rows, g, CSA_HEAD_SIZE, -1);
    s->index_query = drawn(s, "index_query", CSA_BF16, 1, tail, g, shape.index_heads, CSA_SUMMARY_SIZE);
    s->index_weights = drawn(s, "index_weights", CSA_BF16, 1, tail, g, shape.index_heads, -1);
    s->query = drawn(s, "query", CSA_BF16, 1, tail, g, h, CSA_HEAD_SIZE);
    s->gate = drawn(s, "gate", CSA_BF16, 1, tail, g, h, -1);
    if (shape.score_heads) {
        s->score_query = drawn(s, "score_query", CSA_E4M3, 1, tail, g, shape.score_heads, CSA_SUMMARY_SIZE);
        s->score_weights = drawn(s, "score_weights", CSA_F32, 1, tail, g, shape.score_heads, -1);
    }
    if (shape.ties) {
        repeat(s, &s->index_key);
        repeat(s, &s->z);
    }
    draw_parameters(s);
}

void story_end(story *s)
{
    arena_check(&s->memory);
    arena_free(&s->memory);
    free(s->first);
    free(s->prefix);
}

static int64_t tail_row(const story *s, int64_t request, int64_t position)
{
    return request * s->shape.tail + position - s->prefix[request];
}

static int64_t length_of(const story *s, int64_t request)
{
    return s->first[request + 1] - s->first[request];
}

/* ---- A telling's cache -------------------------------------------------------------------------- */

static csa_tensor empty(telling *t, const char *name, csa_dtype dtype, int n0, int n1, int n2, int n3)
{
    int ndim = n3 >= 0 ? 4 : n2 >= 0 ? 3 : n1 >= 0 ? 2 : 1;
    return arena_tensor(&t->memory, name, t->options.strided ? &t->random : NULL, dtype, ndim, n0, n1, n2, n3);
}

/* Blocks in random order; what lies behind a request's last block is junk. */
static void map_blocks(telling *t, int64_t blocks)
{
    int32_t *order = malloc((size_t)blocks * sizeof *order), next = 0;
    for (int32_t i = 0; i < blocks; i++)
        order[i] = i;
    random_shuffle(&t->random, order, blocks);
    for (int64_t r = 0; r < t->story->shape.requests; r++)
        for (int64_t column = 0; column < t->columns; column++) {
            bool live = column * t->options.block_size < length_of(t->story, r);
            int32_t block = live ? order[next++] : random_chance(&t->random, 50) ? -1 : (int32_t)blocks;
            *(int32_t *)tensor_at(&t->block_table, r, column, 0, 0) = block;
        }
    free(order);
}

static void make_cache(telling *t)
{
    const story *s = t->story;
    int size = t->options.block_size, requests = s->shape.requests, capacity = (int)t->options.ring_capacity;
    int64_t blocks = 2;
    for (int64_t r = 0; r < requests; r++)
        blocks += (length_of(s, r) + size - 1) / size;
    t->columns = (s->longest + size - 1) / size + random_between(&t->random, 0, 2);
    t->cache.size = sizeof t->cache;
    t->cache.kv = empty(t, "kv", s->shape.kv_dtype, (int)blocks, s->shape.groups, size, CSA_KV_SIZE);
    t->cache.summaries = empty(t, "summaries", CSA_E4M3, (int)blocks, size / CSA_REGION, CSA_SUMMARY_SIZE, -1);
    t->cache.ring = empty(t, "ring", CSA_BF16, requests * capacity, CSA_RING_SIZE, -1, -1);
    t->cache.ring_capacity = capacity;
    t->cache.k_scale = tensor_at(&s->scales, 0, 0, 0, 0);
    t->cache.v_scale = tensor_at(&s->scales, 1, 0, 0, 0);
    t->block_table = empty(t, "block_table", CSA_I32, requests, (int)t->columns, -1, -1);
    t->ring_base = empty(t, "ring_base", CSA_I64, requests, -1, -1, -1);
    for (int64_t r = 0; r < requests; r++)
        *(int64_t *)tensor_at(&t->ring_base, r, 0, 0, 0) = (requests - 1 - r) * capacity;
    map_blocks(t, blocks);
}

static int64_t slot_of(const telling *t, int64_t request, int64_t position)
{
    int64_t size = t->options.block_size;
    return *(int32_t *)tensor_at(&t->block_table, request, position / size, 0, 0) * size + position % size;
}

/* ---- A step ------------------------------------------------------------------------------------- */

/* Tensors of one step, in memory of its own. */
typedef struct step {
    telling *t;
    arena memory;
    const story_part *parts;
    int32_t parts_count, prefill, query_len;
    int64_t tokens, prefill_tokens;
    bool compared; /* tail rows: with queries and outputs */
    csa_tokens all;
    csa_prepare_args prepare;
    csa_tensor z, score_query, score_weights, gate, out, lse, selected, scores, metadata;
    csa_rows rows_out;
    int64_t regions;
    csa_workspace workspace;
    csa_plan *plan;
} step;

static csa_tensor fresh(step *s, const char *name, csa_dtype dtype, int n0, int n1, int n2, int n3)
{
    int ndim = n3 >= 0 ? 4 : n2 >= 0 ? 3 : n1 >= 0 ? 2 : 1;
    test_random *gaps = s->t->options.strided ? &s->t->random : NULL;
    return arena_tensor(&s->memory, name, gaps, dtype, ndim, n0, n1, n2, n3);
}

/* A tensor of the step's tokens, filled from the story's rows (padding stays NaN). */
static csa_tensor gathered(step *s, const char *name, const csa_tensor *from, bool tail)
{
    int extents[CSA_MAX_DIMS] = {(int)s->tokens, -1, -1, -1};
    for (int d = 1; d < from->ndim; d++)
        extents[d] = (int)from->shape[d];
    csa_tensor to = fresh(s, name, from->dtype, extents[0], extents[1], extents[2], extents[3]);
    int64_t token = 0;
    for (int p = 0; p < s->parts_count; p++)
        for (int64_t i = 0; i < s->parts[p].count; i++, token++) {
            int64_t request = s->parts[p].request, position = s->parts[p].first + i;
            if (request < 0)
                continue;
            const story *from_story = s->t->story;
            int64_t row =
                tail ? tail_row(from_story, request, position) : from_story->first[request] + position;
            csa_tensor one = tensor_slice(to, token, 1), source = tensor_slice(*from, row, 1);
            tensor_copy(&one, &source);
        }
    return to;
}

/* One token's row of a step is kept with the telling. */
static void keep(const step *s, csa_tensor *history, const csa_tensor *from, int64_t per_token)
{
    int64_t token = 0;
    for (int p = 0; p < s->parts_count; p++)
        for (int64_t i = 0; i < s->parts[p].count; i++, token++) {
            int64_t request = s->parts[p].request;
            if (request < 0)
                continue;
            int64_t row = tail_row(s->t->story, request, s->parts[p].first + i);
            csa_tensor to = tensor_slice(*history, row * per_token, per_token);
            csa_tensor source = tensor_slice(*from, token * per_token, per_token);
            tensor_copy(&to, &source);
        }
}

static void make_token(step *s, int64_t request, int64_t position, int64_t token)
{
    test_random *r = &s->t->random;
    int64_t slot = request < 0 ? -random_between(r, 1, 9) : slot_of(s->t, request, position);
    if (request < 0)
        position = random_chance(r, 50) ? -7 : INT32_MAX;
    tensor_put(&s->all.slots, (double)slot, token, 0, 0, 0);
    tensor_put(&s->all.positions, (double)position, token, 0, 0, 0);
}

/* The requests of a step stand in the order of its parts. */
static void make_request(step *s, int part, int64_t first)
{
    const telling *t = s->t;
    int64_t request = s->parts[part].request, length = s->parts[part].first + s->parts[part].count;
    csa_tensor row = tensor_slice(s->all.block_table, part, 1);
    tensor_set(&row, 0x7F); /* past every cache */
    if (request >= 0) {
        csa_tensor from = tensor_slice(t->block_table, request, 1);
        tensor_copy(&row, &from);
    }
    tensor_put(&s->all.ring_base, request < 0 ? 1e9 : tensor_value(&t->ring_base, request, 0, 0, 0), part, 0, 0,
               0);
    tensor_put(&s->all.seq_lens, request < 0 ? 0 : (double)length, part, 0, 0, 0);
    tensor_put(&s->all.query_start, (double)first, part, 0, 0, 0);
}

static void make_tokens(step *s)
{
    csa_tokens *k = &s->all;
    int tokens = (int)s->tokens, parts = s->parts_count;
    test_random *r = &s->t->random;
    *k = (csa_tokens){.size = sizeof *k, .query_len = s->query_len};
    k->block_table = fresh(s, "step.block_table", CSA_I32, parts, (int)s->t->columns, -1, -1);
    k->slots = fresh(s, "step.slots", CSA_I64, tokens, -1, -1, -1);
    k->positions = fresh(s, "step.positions", CSA_I64, tokens, -1, -1, -1);
    k->owners = fresh(s, "step.owners", CSA_I64, tokens, -1, -1, -1);
    k->seq_lens = fresh(s, "step.seq_lens", CSA_I32, parts, -1, -1, -1);
    k->query_start = fresh(s, "step.query_start", CSA_I32, parts + 1, -1, -1, -1);
    k->ring_base = fresh(s, "step.ring_base", CSA_I64, parts, -1, -1, -1);
    int64_t token = 0;
    bool ragged = s->prefill > 0;
    for (int p = 0; p < parts; p++) {
        make_request(s, p, token);
        ragged = ragged || s->parts[p].count != s->query_len;
        for (int64_t i = 0; i < s->parts[p].count; i++, token++) {
            make_token(s, s->parts[p].request, s->parts[p].first + i, token);
            tensor_put(&k->owners, p, token, 0, 0, 0);
        }
    }
    tensor_put(&k->query_start, (double)token, parts, 0, 0, 0);
    if (!ragged && random_chance(r, 50)) /* the call says where it can in other ways */
        k->query_start = (csa_tensor){0};
    if (!s->prefill && random_chance(r, 50))
        k->positions = (csa_tensor){0};
    else if (random_chance(r, 50))
        k->seq_lens = (csa_tensor){0};
    if (random_chance(r, 50))
        k->owners = (csa_tensor){0};
}

static void make_prepare(step *s)
{
    const story *from = s->t->story;
    csa_prepare_args *p = &s->prepare;
    int t = (int)s->tokens, g = from->shape.groups, h = s->compared ? from->shape.heads : 1;
    *p = (csa_prepare_args){
        .size = sizeof *p,
        .tokens = &s->all,
        .cache = &s->t->cache,
        .index_key = gathered(s, "step.index_key", &from->index_key, false),
        .index_query_norm = from->index_query_norm,
        .index_key_norm = from->index_key_norm,
        .index_key_bias = from->index_key_bias,
        .index_rope = from->index_rope,
        .key = gathered(s, "step.key", &from->key, false),
        .value = gathered(s, "step.value", &from->value, false),
        .query_norm = from->query_norm,
        .key_norm = from->key_norm,
        .rope = from->rope,
        .eps = 1e-5F,
        .zero_centered = from->shape.zero_centered,
        .native_rope = from->shape.native_rope,
    };
    s->z = gathered(s, "step.z", &from->z, false);
    if (s->compared) {
        p->index_query = gathered(s, "step.index_query", &from->index_query, true);
        p->index_weights = gathered(s, "step.index_weights", &from->index_weights, true);
        p->query = gathered(s, "step.query", &from->query, true);
    } else { /* the same row for all: queries of a prefix are not looked at */
        p->index_query = tensor_slice(from->index_query, 0, 1);
        p->index_weights = tensor_slice(from->index_weights, 0, 1);
        p->query = tensor_slice(from->query, 0, 1);
        csa_tensor *same[] = {&p->index_query, &p->index_weights, &p->query};
        for (int i = 0; i < 3; i++) {
            same[i]->shape[0] = t;
            same[i]->stride[0] = 0;
        }
        p->query.shape[2] = 1;
    }
    p->index_query_out = fresh(s, "step.index_query_out", CSA_E4M3, t, g, CSA_INDEX_HEADS, CSA_SUMMARY_SIZE);
    p->index_key_out = fresh(s, "step.index_key_out", CSA_BF16, t, CSA_SUMMARY_SIZE, -1, -1);
    p->index_weights_out = fresh(s, "step.index_weights_out", CSA_F32, t, g, CSA_INDEX_HEADS, -1);
    p->query_out = fresh(s, "step.query_out", CSA_BF16, t, g, h, CSA_HEAD_SIZE);
}

static void make_outputs(step *s)
{
    const story_shape *shape = &s->t->story->shape;
    int t = (int)s->tokens, g = shape->groups, h = shape->heads, rows = t * g, table = 0;
    int64_t needed = (s->t->story->longest + CSA_REGION - 1) / CSA_REGION, more = s->t->options.more_regions;
    table = (int)(s->t->columns * s->t->options.block_size / CSA_REGION);
    s->regions = more < 0 ? 0 : needed + more;
    int regions = s->regions ? (int)s->regions : table, width = shape->topk < regions ? shape->topk : regions;
    s->gate = gathered(s, "step.gate", &s->t->story->gate, true);
    s->out = fresh(s, "step.out", CSA_BF16, t, g, h, CSA_HEAD_SIZE);
    s->lse = fresh(s, "step.lse", CSA_F32, t, g, h, -1);
    s->selected = fresh(s, "step.selected", CSA_I64, rows, width + 1, -1, -1);
    s->scores = fresh(s, "step.scores", CSA_F32, rows, regions, -1, -1);
    s->rows_out.size = sizeof s->rows_out;
    s->rows_out.active = fresh(s, "step.active", CSA_BOOL, rows, -1, -1, -1);
    s->rows_out.positions = fresh(s, "step.row positions", CSA_I64, rows, -1, -1, -1);
    s->rows_out.current = fresh(s, "step.current", CSA_I64, rows, -1, -1, -1);
    s->rows_out.lengths = fresh(s, "step.lengths", CSA_I32, rows, -1, -1, -1);
    s->rows_out.topk_lengths = fresh(s, "step.topk_lengths", CSA_I32, rows, -1, -1, -1);
    s->score_query = s->prepare.index_query_out;
    s->score_weights = s->prepare.index_weights_out;
    if (shape->score_heads) {
        s->score_query = gathered(s, "step.score_query", &s->t->story->score_query, true);
        s->score_weights = gathered(s, "step.score_weights", &s->t->story->score_weights, true);
    }
    csa_serving serving = {.size = sizeof serving, .regions = regions, .groups = g, .topk = shape->topk};
    serving.decode_tokens = s->tokens - s->prefill_tokens;
    serving.prefill_tokens = s->prefill_tokens;
    csa_context_options options = test_options(s->t->options.runner->options);
    CHECK_OK(csa_workspace_size(&options, &serving, &s->workspace.bytes));
    s->workspace.data = arena_buffer(&s->memory, "workspace", s->workspace.bytes)->data;
    memset(s->memory.first->covered, 1, s->workspace.bytes);
}

/* Bounds are sometimes looser than the true positions. */
static void make_plan(step *s)
{
    int64_t *positions = calloc((size_t)s->prefill_tokens + 1, sizeof *positions);
    int64_t slack = random_between(&s->t->random, 0, 1) * 20;
    for (int64_t i = 0; i < s->prefill_tokens; i++) {
        int64_t position = *(int64_t *)tensor_at(&s->all.positions, i, 0, 0, 0);
        positions[i] = position < 0 ? position : position + slack;
    }
    int64_t table = s->t->columns * s->t->options.block_size / CSA_REGION;
    csa_plan_args args = {.size = sizeof args,
                          .positions = random_chance(&s->t->random, 80) ? positions : NULL,
                          .tokens = s->prefill_tokens,
                          .requests = s->prefill,
                          .regions = s->regions ? s->regions : table,
                          .groups = s->t->story->shape.groups,
                          .topk = s->t->story->shape.topk,
                          .invariant = true};
    CHECK_OK(csa_plan_prefill(s->t->options.runner->context, &args, &s->plan));
    free(positions);
}

/* ---- Running it --------------------------------------------------------------------------------- */

/* The tokens of one part of a step: prefill, or what follows. */
static csa_tokens part_tokens(const step *s, bool prefill, int64_t first, int64_t count)
{
    csa_tokens k = s->all;
    int64_t request = prefill ? 0 : s->prefill, requests = prefill ? s->prefill : s->parts_count - s->prefill;
    k.slots = tensor_slice(k.slots, first, count);
    k.positions = tensor_slice(k.positions, first, count);
    k.owners = tensor_slice(k.owners, first, count);
    k.block_table = tensor_slice(k.block_table, request, requests);
    k.seq_lens = tensor_slice(k.seq_lens, request, requests);
    k.ring_base = tensor_slice(k.ring_base, request, requests);
    k.query_start = tensor_slice(k.query_start, request, requests + 1);
    if (s->prefill && !prefill) /* both count from the first token of the whole step */
        k.owners = k.query_start = (csa_tensor){0};
    return k;
}

static csa_rows part_rows(const csa_rows *all, int64_t first, int64_t count)
{
    return (csa_rows){.size = sizeof(csa_rows),
                      .active = tensor_slice(all->active, first, count),
                      .positions = tensor_slice(all->positions, first, count),
                      .current = tensor_slice(all->current, first, count),
                      .lengths = tensor_slice(all->lengths, first, count),
                      .topk_lengths = tensor_slice(all->topk_lengths, first, count)};
}

static void run_stages(step *s, const csa_step_args *a, int64_t rows)
{
    csa_tensor scores = tensor_slice(s->scores, 0, rows);
    csa_score_args score = {.size = sizeof score,
                            .tokens = a->tokens,
                            .cache = a->cache,
                            .query = a->index_query,
                            .weights = a->index_weights,
                            .scores = scores,
                            .rows_out = a->rows_out};
    csa_select_args select = {.size = sizeof select,
                              .scores = scores,
                              .current = a->rows_out->current,
                              .selected = a->selected,
                              .topk = a->topk};
    csa_attend_args attend = {.size = sizeof attend,
                              .tokens = a->tokens,
                              .cache = a->cache,
                              .query = a->query,
                              .selected = a->selected,
                              .gate = a->gate,
                              .out = a->out,
                              .lse = a->lse,
                              .scale = a->scale};
    if (random_chance(&s->t->random, 50))
        attend.rows = a->rows_out;
    const csa_context *context = s->t->options.runner->context;
    CHECK_OK(csa_score(context, &score));
    CHECK_OK(csa_select(context, &select));
    CHECK_OK(csa_attend(context, &attend));
}

static void summarize(step *s, const csa_tokens *tokens, bool prefill, int64_t first, int64_t count)
{
    const csa_context *context = s->t->options.runner->context;
    csa_summarize_args a = {.size = sizeof a, .tokens = tokens, .cache = &s->t->cache};
    a.key = tensor_slice(s->prepare.index_key_out, first, count);
    a.z = tensor_slice(s->z, first, count);
    if (!prefill) {
        CHECK_OK(s->query_len > 1 ? csa_summarize_verify(context, &a) : csa_summarize_decode(context, &a));
        return;
    }
    if (s->t->options.metadata) {
        a.metadata = s->metadata = fresh(s, "metadata", CSA_I64, (int)count, 10, -1, -1);
        CHECK_OK(csa_summarize_metadata(context, &a));
    }
    CHECK_OK(csa_summarize_prefill(context, &a));
}

/* Summarize, then score, select and attend, of tokens [first, first + count). */
static void run_part(step *s, bool prefill, int64_t first, int64_t count)
{
    int64_t groups = s->t->story->shape.groups;
    csa_tokens tokens = part_tokens(s, prefill, first, count);
    summarize(s, &tokens, prefill, first, count);
    if (!s->compared)
        return;
    csa_rows rows = part_rows(&s->rows_out, first * groups, count * groups);
    csa_step_args a = {.size = sizeof a,
                       .tokens = &tokens,
                       .cache = &s->t->cache,
                       .index_query = tensor_slice(s->score_query, first, count),
                       .index_weights = tensor_slice(s->score_weights, first, count),
                       .query = tensor_slice(s->prepare.query_out, first, count),
                       .gate = tensor_slice(s->gate, first, count),
                       .out = tensor_slice(s->out, first, count),
                       .lse = tensor_slice(s->lse, first, count),
                       .rows_out = &rows,
                       .selected = tensor_slice(s->selected, first * groups, count * groups),
                       .regions = s->regions,
                       .topk = s->t->story->shape.topk,
                       .scale = 0.2F,
                       .workspace = s->workspace};
    if (s->t->options.stages)
        run_stages(s, &a, count * groups);
    else if (prefill)
        CHECK_OK(csa_prefill(s->t->options.runner->context, s->plan, &a));
    else
        CHECK_OK(csa_decode(s->t->options.runner->context, &a));
}

static void run_layer(step *s)
{
    csa_layer_args a = {.size = sizeof a,
                        .prepare = &s->prepare,
                        .z = s->z,
                        .gate = s->gate,
                        .out = s->out,
                        .lse = s->lse,
                        .rows_out = &s->rows_out,
                        .selected = s->selected,
                        .regions = s->regions,
                        .topk = s->t->story->shape.topk,
                        .scale = 0.2F,
                        .workspace = s->workspace};
    const csa_context *context = s->t->options.runner->context;
    if (s->plan && s->t->options.metadata) {
        csa_tokens tokens = part_tokens(s, true, 0, s->prefill_tokens);
        a.metadata = fresh(s, "metadata", CSA_I64, (int)s->prefill_tokens, 10, -1, -1);
        csa_summarize_args m = {.size = sizeof m, .tokens = &tokens, .metadata = a.metadata};
        CHECK_OK(csa_summarize_metadata(context, &m));
    }
    CHECK_OK(csa_layer(context, s->plan, &a));
}

static void run(step *s)
{
    if (!s->t->options.separate && s->compared) {
        run_layer(s);
        return;
    }
    CHECK_OK(csa_prepare(s->t->options.runner->context, &s->prepare));
    if (s->prefill_tokens)
        run_part(s, true, 0, s->prefill_tokens);
    if (s->tokens > s->prefill_tokens)
        run_part(s, false, s->prefill_tokens, s->tokens - s->prefill_tokens);
}

/* ---- What came out ------------------------------------------------------------------------------ */

/* Section 4's metadata, and exact zeros for padding. */
static void check_row(const step *s, int64_t row, bool active, int64_t position)
{
    int64_t groups = s->t->story->shape.groups, token = row / groups, group = row % groups;
    position = active ? position : 0;
    CHECK((tensor_value(&s->rows_out.active, row, 0, 0, 0) != 0) == active);
    CHECK(tensor_value(&s->rows_out.positions, row, 0, 0, 0) == (double)position);
    CHECK(tensor_value(&s->rows_out.current, row, 0, 0, 0) == (double)(position / CSA_REGION));
    CHECK(tensor_value(&s->rows_out.lengths, row, 0, 0, 0) == (double)(position / CSA_REGION + 1));
    CHECK(tensor_value(&s->rows_out.topk_lengths, row, 0, 0, 0) == (double)(position / CSA_REGION));
    for (int64_t h = 0; h < s->out.shape[2]; h++) {
        double lse = tensor_value(&s->lse, token, group, h, 0);
        CHECK(active ? isfinite(lse) : isinf(lse) && lse < 0);
        for (int64_t i = 0; i < CSA_HEAD_SIZE; i++) {
            uint16_t code = *(uint16_t *)tensor_at(&s->out, token, group, h, i);
            CHECK(active ? isfinite(bf16_value(code)) : code == 0);
        }
    }
}

static void check_rows(const step *s)
{
    int64_t token = 0, groups = s->t->story->shape.groups;
    for (int p = 0; p < s->parts_count; p++)
        for (int64_t i = 0; i < s->parts[p].count; i++, token++)
            for (int64_t g = 0; g < groups; g++)
                check_row(s, token * groups + g, s->parts[p].request >= 0, s->parts[p].first + i);
}

/* Lists are kept right-aligned, since their width depends on `regions`; scores of historical regions alone. */
static void keep_lists(step *s)
{
    telling *t = s->t;
    int64_t groups = t->story->shape.groups, kept = t->selected.shape[1], token = 0;
    csa_score_args score = {.size = sizeof score,
                            .tokens = &s->all,
                            .cache = &t->cache,
                            .query = s->score_query,
                            .weights = s->score_weights,
                            .scores = s->scores};
    CHECK_OK(csa_score(t->options.runner->context, &score));
    for (int p = 0; p < s->parts_count; p++)
        for (int64_t i = 0; i < s->parts[p].count; i++, token++)
            for (int64_t g = 0; s->parts[p].request >= 0 && g < groups; g++) {
                int64_t from = token * groups + g, position = s->parts[p].first + i;
                int64_t to = tail_row(t->story, s->parts[p].request, position) * groups + g;
                int64_t columns = s->selected.shape[1];
                for (int64_t c = 0; c < columns; c++) {
                    double entry = tensor_value(&s->selected, from, c, 0, 0);
                    if (c >= columns - kept)
                        tensor_put(&t->selected, entry, to, c + kept - columns, 0, 0);
                }
                for (int64_t r = 0; r < position / CSA_REGION; r++)
                    tensor_put(&t->scores, tensor_value(&s->scores, from, r, 0, 0), to, r, 0, 0);
            }
}

static void tell(telling *t, const story_part *parts, int32_t count, int32_t prefill, int32_t query_len,
                 bool tail)
{
    step s = {.t = t, .parts = parts, .parts_count = count, .prefill = prefill, .query_len = query_len};
    s.compared = tail;
    for (int p = 0; p < count; p++) {
        s.tokens += parts[p].count;
        s.prefill_tokens += p < prefill ? parts[p].count : 0;
        if (parts[p].request >= 0)
            t->done[parts[p].request] = parts[p].first + parts[p].count;
    }
    make_tokens(&s);
    make_prepare(&s);
    if (tail)
        make_outputs(&s);
    if (tail && prefill)
        make_plan(&s);
    run(&s);
    if (tail) {
        check_rows(&s);
        keep(&s, &t->index_key, &s.prepare.index_key_out, 1);
        keep(&s, &t->out, &s.out, 1);
        keep(&s, &t->lse, &s.lse, 1);
        keep_lists(&s);
    }
    arena_check(&s.memory);
    arena_free(&s.memory);
    csa_plan_destroy(s.plan);
}

/* ---- Telling ------------------------------------------------------------------------------------ */

void telling_begin(telling *t, const story *s, telling_options options, uint64_t number)
{
    memset(t, 0, sizeof *t);
    t->story = s;
    t->options = options;
    t->random = random_of(number, 0x74656C6C);
    t->done = calloc((size_t)s->shape.requests, sizeof *t->done);
    make_cache(t);
    int tail = s->shape.requests * (int)s->shape.tail, g = s->shape.groups, h = s->shape.heads;
    int64_t regions = (s->longest + CSA_REGION - 1) / CSA_REGION;
    int width = (int)(s->shape.topk < regions ? s->shape.topk : regions);
    t->index_key = empty(t, "kept index_key", CSA_BF16, tail, CSA_SUMMARY_SIZE, -1, -1);
    t->out = empty(t, "kept out", CSA_BF16, tail, g, h, CSA_HEAD_SIZE);
    t->lse = empty(t, "kept lse", CSA_F32, tail, g, h, -1);
    t->selected = empty(t, "kept selected", CSA_I64, tail * g, width + 1, -1, -1);
    t->scores = empty(t, "kept scores", CSA_F32, tail * g, (int)regions, -1, -1);
    story_part *parts = calloc((size_t)s->shape.requests, sizeof *parts);
    for (int32_t r = 0; r < s->shape.requests; r++)
        parts[r] = (story_part){r, 0, s->prefix[r], 0};
    tell(t, parts, s->shape.requests, s->shape.requests, 1, false);
    free(parts);
}

void telling_end(telling *t)
{
    arena_check(&t->memory);
    arena_free(&t->memory);
    free(t->done);
}

void telling_step(telling *t, const story_part *parts, int32_t count, int32_t prefill, int32_t query_len)
{
    tell(t, parts, count, prefill, query_len, true);
}

/* The parts of a step: each request's next tokens, with padding between them, in random order. */
typedef struct part_list {
    story_part parts[64];
    int32_t count;
} part_list;

static void add_part(telling *t, part_list *list, int64_t request, int64_t count)
{
    if (t->options.padding && random_chance(&t->random, 40))
        list->parts[list->count++] = (story_part){-1, 0, count, 0};
    list->parts[list->count++] = (story_part){request, t->done[request], count, 0};
}

static int64_t left(const telling *t, int64_t request)
{
    return length_of(t->story, request) - t->done[request];
}

static void telling_uniform(telling *t, int32_t query_len)
{
    int64_t requests = t->story->shape.requests, start = random_between(&t->random, 0, requests - 1);
    for (;;) {
        part_list list = {.count = 0};
        for (int64_t i = 0; i < requests; i++) {
            int64_t r = (i + start) % requests, count = left(t, r) < query_len ? left(t, r) : query_len;
            if (count > 0)
                add_part(t, &list, r, count);
        }
        if (list.count == 0)
            return;
        telling_step(t, list.parts, list.count, 0, query_len);
    }
}

void telling_decode(telling *t)
{
    telling_uniform(t, 1);
}

void telling_verify(telling *t, int32_t query_len)
{
    telling_uniform(t, query_len);
}

void telling_prefill(telling *t, int64_t largest_chunk)
{
    for (;;) {
        part_list list = {.count = 0};
        for (int64_t r = 0; r < t->story->shape.requests; r++) {
            int64_t count = random_between(&t->random, 1, largest_chunk);
            count = count < left(t, r) ? count : left(t, r);
            if (count > 0)
                add_part(t, &list, r, count);
        }
        if (list.count == 0)
            return;
        telling_step(t, list.parts, list.count, list.count, 1);
    }
}

void telling_mixed(telling *t)
{
    for (;;) {
        part_list prefill = {.count = 0}, decode = {.count = 0};
        int32_t query_len = (int32_t)random_between(&t->random, 1, 3);
        for (int64_t r = 0; r < t->story->shape.requests; r++) {
            int64_t count = random_between(&t->random, 1, left(t, r) > 0 ? left(t, r) : 1);
            if (left(t, r) >= query_len && random_chance(&t->random, 50))
                add_part(t, &decode, r, query_len);
            else if (left(t, r) > 0)
                add_part(t, &prefill, r, count);
        }
        int32_t count = prefill.count;
        for (int32_t i = 0; i < decode.count; i++)
            prefill.parts[prefill.count++] = decode.parts[i];
        if (prefill.count == 0)
            return;
        telling_step(t, prefill.parts, prefill.count, count, query_len);
    }
}

/* ---- Comparing ---------------------------------------------------------------------------------- */

static void expect_same_token(const telling *a, const telling *b, int64_t request, int64_t position)
{
    int64_t size_a = a->options.block_size, size_b = b->options.block_size;
    int64_t at_a = slot_of(a, request, position), at_b = slot_of(b, request, position);
    for (int64_t g = 0; g < a->story->shape.groups; g++) {
        size_t bytes = CSA_KV_SIZE * (size_t)tensor_itemsize(a->cache.kv.dtype);
        const void *x = tensor_at(&a->cache.kv, at_a / size_a, g, at_a % size_a, 0);
        const void *y = tensor_at(&b->cache.kv, at_b / size_b, g, at_b % size_b, 0);
        CHECKF(memcmp(x, y, bytes) == 0, "cache of request %d, position %d, group %d", (int)request,
               (int)position, (int)g);
    }
    if (position % CSA_REGION == CSA_REGION - 1) {
        const void *x = tensor_at(&a->cache.summaries, at_a / size_a, at_a % size_a / CSA_REGION, 0, 0);
        const void *y = tensor_at(&b->cache.summaries, at_b / size_b, at_b % size_b / CSA_REGION, 0, 0);
        CHECKF(memcmp(x, y, CSA_SUMMARY_SIZE) == 0, "summary of request %d, position %d", (int)request,
               (int)position);
    }
}

static const void *ring_row(const telling *t, int64_t request, int64_t position)
{
    int64_t base = *(int64_t *)tensor_at(&t->ring_base, request, 0, 0, 0);
    return tensor_at(&t->cache.ring, base + position % t->cache.ring_capacity, 0, 0, 0);
}

void telling_expect_equal(const telling *got, const telling *expected)
{
    tensor_expect_equal("index_key", &got->index_key, &expected->index_key);
    tensor_expect_equal("scores", &got->scores, &expected->scores);
    tensor_expect_equal("selected", &got->selected, &expected->selected);
    tensor_expect_equal("out", &got->out, &expected->out);
    tensor_expect_equal("lse", &got->lse, &expected->lse);
    for (int64_t r = 0; r < got->story->shape.requests; r++) {
        int64_t length = got->done[r];
        CHECK(length == expected->done[r]);
        for (int64_t position = 0; position < length; position++)
            expect_same_token(got, expected, r, position);
        for (int64_t position = length / CSA_REGION * CSA_REGION; position < length; position++)
            CHECKF(memcmp(ring_row(got, r, position), ring_row(expected, r, position), CSA_RING_SIZE * 2) == 0,
                   "ring of request %d, position %d", (int)r, (int)position);
    }
}
