/*
 * Serving a generated context as an engine would.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "run_engine.h"
#include "judge.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { SPARE_BLOCKS = 3 /* of other requests, as it were: full of NaN */, WORKSPACE_ALIGNMENT = 256 };

static const float e4m3_scale = 0.03125F; /* a power of two: codes times it are bf16 numbers */

static int64_t ring_capacity(const engine *e)
{
    int64_t capacity = CSA_REGION - 2 + e->options.query_len;
    return capacity > CSA_REGION ? capacity : CSA_REGION;
}

static size_t kv_element(const engine *e)
{
    return e->options.e4m3 ? sizeof(uint8_t) : sizeof(uint16_t);
}

/* ---- Memory ------------------------------------------------------------------------------------- */

/* Most tokens of a step. */
static int64_t step_tokens(const engine *e)
{
    int64_t decode = e->requests * e->options.query_len;
    return e->options.chunk > decode ? e->options.chunk : decode;
}

static bool allocate_state(engine *e)
{
    size_t rows = (size_t)(e->blocks * e->groups * e->block_size), requests = (size_t)e->requests;
    e->kv = calloc(rows, CSA_KV_SIZE * kv_element(e));
    e->summaries = calloc((size_t)(e->blocks * (e->block_size / CSA_REGION)), CSA_SUMMARY_SIZE);
    e->ring = calloc(requests * (size_t)ring_capacity(e), CSA_RING_SIZE * sizeof *e->ring);
    e->table = calloc((size_t)e->blocks, sizeof *e->table);
    e->length = calloc(requests, sizeof *e->length);
    e->ring_base = calloc(requests, sizeof *e->ring_base);
    e->query_start = calloc(requests + 1, sizeof *e->query_start);
    return e->kv && e->summaries && e->ring && e->table && e->length && e->ring_base && e->query_start;
}

static bool allocate_projections(engine *e, size_t tokens)
{
    projections *p = &e->in;
    size_t groups = tokens * (size_t)e->groups, bf16 = sizeof(uint16_t);
    size_t index_rows = groups * (size_t)e->index_heads, rows = groups * (size_t)e->heads;
    p->index_query = calloc(index_rows, CSA_SUMMARY_SIZE * bf16);
    p->index_key = calloc(tokens, CSA_SUMMARY_SIZE * bf16);
    p->z = calloc(tokens, CSA_SUMMARY_SIZE * bf16);
    p->index_weights = calloc(index_rows, bf16);
    p->query = calloc(rows, CSA_HEAD_SIZE * bf16);
    p->key = calloc(groups, CSA_HEAD_SIZE * bf16);
    p->value = calloc(groups, CSA_HEAD_SIZE * bf16);
    p->gate = calloc(rows, bf16);
    return p->index_query && p->index_key && p->z && p->index_weights && p->query && p->key && p->value &&
           p->gate;
}

static bool allocate_step(engine *e)
{
    size_t tokens = (size_t)step_tokens(e), decode = (size_t)(e->requests * e->options.query_len);
    size_t groups = tokens * (size_t)e->groups, per_token = (size_t)(e->groups * e->heads) * CSA_HEAD_SIZE;
    size_t positions = (size_t)(e->columns * e->block_size);
    e->places = calloc(tokens, sizeof *e->places);
    e->slots = calloc(tokens, sizeof *e->slots);
    e->positions = calloc(tokens, sizeof *e->positions);
    e->index_query = calloc(groups * CSA_INDEX_HEADS, CSA_SUMMARY_SIZE);
    e->index_weights = calloc(groups * CSA_INDEX_HEADS, sizeof *e->index_weights);
    e->out = calloc(tokens * per_token, sizeof *e->out);
    e->again = calloc(decode * per_token, sizeof *e->again);
    e->selected = calloc(groups * (size_t)(e->width + 1), sizeof *e->selected);
    e->norms = calloc(2, CSA_SUMMARY_SIZE * sizeof *e->norms);
    e->index_rope = calloc(positions, CSA_INDEX_ROTARY * sizeof *e->index_rope);
    e->rope = calloc(positions, GENERATE_ROTARY * sizeof *e->rope);
    return e->places && e->slots && e->positions && e->index_query && e->index_weights && e->out && e->again &&
           e->selected && e->norms && e->index_rope && e->rope && allocate_projections(e, tokens);
}

void engine_close(engine *e)
{
    void *const memory[] = {e->kv,
                            e->summaries,
                            e->ring,
                            e->table,
                            e->length,
                            e->ring_base,
                            e->query_start,
                            e->places,
                            e->slots,
                            e->positions,
                            e->index_query,
                            e->index_weights,
                            e->out,
                            e->again,
                            e->selected,
                            e->norms,
                            e->index_rope,
                            e->rope,
                            e->workspace.data,
                            e->in.index_query,
                            e->in.index_key,
                            e->in.z,
                            e->in.index_weights,
                            e->in.query,
                            e->in.key,
                            e->in.value,
                            e->in.gate};
    for (size_t i = 0; i < sizeof memory / sizeof *memory; i++)
        free(memory[i]);
    csa_plan_destroy(e->plan);
    csa_context_destroy(e->context);
}

/* ---- What stays the same over all steps --------------------------------------------------------- */

/* A fixed permutation of the blocks, so that neighbouring tokens, and the blocks of a request, lie far apart.
 */
static void shuffle_blocks(engine *e)
{
    uint64_t state = 1;
    for (int64_t i = 0; i < e->blocks; i++) {
        state = state * 6364136223846793005U + 1442695040888963407U;
        int64_t other = (int64_t)((state >> 33) % (uint64_t)(i + 1));
        e->table[i] = e->table[other];
        e->table[other] = (int32_t)i;
    }
}

/* What no token fills stays NaN, and must not show in any result. */
static void fill_memory(engine *e)
{
    size_t rows = (size_t)(e->blocks * e->groups * e->block_size);
    memset(e->kv, 0xFF, rows * CSA_KV_SIZE * kv_element(e));
    memset(e->summaries, 0x7F, (size_t)(e->blocks * (e->block_size / CSA_REGION)) * CSA_SUMMARY_SIZE);
    memset(e->ring, 0xFF, (size_t)(e->requests * ring_capacity(e)) * CSA_RING_SIZE * sizeof *e->ring);
    for (int64_t i = 0; i < CSA_SUMMARY_SIZE; i++)
        e->norms[i] = 0x3F80; /* 1 */
    for (int64_t r = 0; r < e->requests; r++)
        e->ring_base[r] = r * ring_capacity(e);
    generate_rope(e->index_rope, e->columns * e->block_size, CSA_INDEX_ROTARY);
    generate_rope(e->rope, e->columns * e->block_size, GENERATE_ROTARY);
}

/* What e4m3 codes stand for, as bf16; exact, since the scale is a power of two. */
static void fill_codes(engine *e)
{
    for (int i = 0; i < 256; i++) {
        uint8_t code = (uint8_t)i;
        float value = e->kv_scale * (float)judge_value(CSA_E4M3, &code, 0);
        uint32_t bits;
        memcpy(&bits, &value, sizeof bits);
        e->codes[i] = (uint16_t)(bits >> 16);
    }
}

static void describe_cache(engine *e)
{
    int64_t regions = e->block_size / CSA_REGION, capacity = ring_capacity(e);
    e->kv_scale = e->options.e4m3 ? e4m3_scale : 1;
    e->cache = (csa_cache){
        .size = sizeof e->cache,
        .kv = csa_tensor_4d(e->kv, e->options.e4m3 ? CSA_E4M3 : CSA_BF16, e->blocks, e->groups, e->block_size,
                            CSA_KV_SIZE),
        .summaries = csa_tensor_3d(e->summaries, CSA_E4M3, e->blocks, regions, CSA_SUMMARY_SIZE),
        .ring = csa_tensor_2d(e->ring, CSA_BF16, e->requests * capacity, CSA_RING_SIZE),
        .ring_capacity = capacity,
        .k_scale = e->options.e4m3 ? &e->kv_scale : NULL,
        .v_scale = e->options.e4m3 ? &e->kv_scale : NULL,
    };
}

static int make_context(engine *e)
{
    const engine_options *o = &e->options;
    csa_context_options options = {
        .size = sizeof options, .backend = o->backend, .threads = o->threads, .tier = o->tier};
    csa_serving serving = {.size = sizeof serving,
                           .regions = e->columns * (e->block_size / CSA_REGION),
                           .decode_tokens = e->requests * o->query_len,
                           .prefill_tokens = o->chunk,
                           .groups = (int32_t)e->groups,
                           .heads = (int32_t)e->heads,
                           .block_size = (int32_t)e->block_size,
                           .topk = (int32_t)o->topk,
                           .kv_dtype = e->cache.kv.dtype};
    csa_status status = csa_context_create(&options, &e->context);
    if (status)
        return tool_library_error("run", "csa_context_create", status);
    if (csa_context_backend(e->context) == CSA_BACKEND_CUDA)
        return tool_fail(TOOL_UNSUPPORTED, "run", "the cuda back end is not supported by this command yet");
    status = csa_workspace_size(&options, &serving, &e->workspace.bytes);
    if (status)
        return tool_library_error("run", "csa_workspace_size", status);
    size_t units = e->workspace.bytes / WORKSPACE_ALIGNMENT + 1;
    e->workspace.data = aligned_alloc(WORKSPACE_ALIGNMENT, units * WORKSPACE_ALIGNMENT);
    if (!e->workspace.data)
        return tool_fail(TOOL_INTERNAL, "run", "no memory for a workspace of %zu bytes", e->workspace.bytes);
    status = csa_warm_up(e->context, &serving, e->workspace);
    return status ? tool_library_error("run", "csa_warm_up", status) : TOOL_OK;
}

static void set_width(engine *e, int64_t regions)
{
    e->width = e->options.topk < regions ? e->options.topk : regions;
}

int engine_open(engine *e, const generator *source, const engine_options *options)
{
    const generate_options *g = &source->options;
    *e = (engine){.options = *options, .source = source, .requests = g->requests, .groups = g->groups};
    e->heads = g->heads;
    e->index_heads = g->index_heads;
    e->block_size = options->block_size;
    e->columns = (g->tokens - 1) / e->block_size + 1;
    e->blocks = e->requests * e->columns + SPARE_BLOCKS;
    set_width(e, e->columns * (e->block_size / CSA_REGION));
    if (e->blocks > INT32_MAX || !allocate_state(e) || !allocate_step(e))
        return tool_fail(TOOL_INTERNAL, "run", "no memory for %" PRId64 " requests of %" PRId64 " tokens",
                         e->requests, g->tokens);
    shuffle_blocks(e);
    fill_memory(e);
    describe_cache(e);
    fill_codes(e);
    return make_context(e);
}

/* ---- Steps -------------------------------------------------------------------------------------- */

int64_t engine_slot(const engine *e, int64_t request, int64_t position)
{
    int32_t block = e->table[request * e->columns + position / e->block_size];
    return block * e->block_size + position % e->block_size;
}

/* Token number i of the step. */
static void place_token(engine *e, int64_t i, generate_place place)
{
    e->places[i] = place;
    e->positions[i] = place.position;
    e->slots[i] = engine_slot(e, place.request, place.position);
}

/* The step's tokens belong to requests [first, first + requests). */
static void describe_tokens(engine *e, int64_t first, int64_t requests)
{
    e->tokens = (csa_tokens){
        .size = sizeof e->tokens,
        .block_table = csa_tensor_2d(e->table + first * e->columns, CSA_I32, requests, e->columns),
        .slots = csa_tensor_1d(e->slots, CSA_I64, e->count),
        .positions = csa_tensor_1d(e->positions, CSA_I64, e->count),
        .ring_base = csa_tensor_1d(e->ring_base + first, CSA_I64, requests),
    };
}

/* Index keys and queries are prepared in place. */
static csa_prepare_args prepare_args(const engine *e)
{
    const projections *in = &e->in;
    int64_t t = e->count, g = e->groups, positions = e->columns * e->block_size;
    const uint16_t *zeros = e->norms + CSA_SUMMARY_SIZE;
    return (csa_prepare_args){
        .size = sizeof(csa_prepare_args),
        .tokens = &e->tokens,
        .cache = &e->cache,
        .index_query = csa_tensor_4d(in->index_query, CSA_BF16, t, g, e->index_heads, CSA_SUMMARY_SIZE),
        .index_key = csa_tensor_2d(in->index_key, CSA_BF16, t, CSA_SUMMARY_SIZE),
        .index_weights = csa_tensor_3d(in->index_weights, CSA_BF16, t, g, e->index_heads),
        .index_query_norm = csa_tensor_1d(e->norms, CSA_BF16, CSA_SUMMARY_SIZE),
        .index_key_norm = csa_tensor_1d(e->norms, CSA_BF16, CSA_SUMMARY_SIZE),
        .index_key_bias = csa_tensor_1d(zeros, CSA_BF16, CSA_SUMMARY_SIZE),
        .index_rope = csa_tensor_2d(e->index_rope, CSA_BF16, positions, CSA_INDEX_ROTARY),
        .index_query_out = csa_tensor_4d(e->index_query, CSA_E4M3, t, g, CSA_INDEX_HEADS, CSA_SUMMARY_SIZE),
        .index_key_out = csa_tensor_2d(in->index_key, CSA_BF16, t, CSA_SUMMARY_SIZE),
        .index_weights_out = csa_tensor_3d(e->index_weights, CSA_F32, t, g, CSA_INDEX_HEADS),
        .query = csa_tensor_4d(in->query, CSA_BF16, t, g, e->heads, CSA_HEAD_SIZE),
        .key = csa_tensor_3d(in->key, CSA_BF16, t, g, CSA_HEAD_SIZE),
        .value = csa_tensor_3d(in->value, CSA_BF16, t, g, CSA_HEAD_SIZE),
        .query_norm = csa_tensor_1d(e->norms, CSA_BF16, CSA_HEAD_SIZE),
        .key_norm = csa_tensor_1d(e->norms, CSA_BF16, CSA_HEAD_SIZE),
        .rope = csa_tensor_2d(e->rope, CSA_BF16, positions, GENERATE_ROTARY),
        .query_out = csa_tensor_4d(in->query, CSA_BF16, t, g, e->heads, CSA_HEAD_SIZE),
        .eps = 1e-5F,
    };
}

static csa_layer_args layer_args(const engine *e, const csa_prepare_args *prepare)
{
    int64_t t = e->count, g = e->groups;
    return (csa_layer_args){
        .size = sizeof(csa_layer_args),
        .prepare = prepare,
        .z = csa_tensor_2d(e->in.z, CSA_BF16, t, CSA_SUMMARY_SIZE),
        .gate = csa_tensor_3d(e->in.gate, CSA_BF16, t, g, e->heads),
        .out = csa_tensor_4d(e->out, CSA_BF16, t, g, e->heads, CSA_HEAD_SIZE),
        .selected = csa_tensor_2d(e->selected, CSA_I64, t * g, e->width + 1),
        .topk = (int32_t)e->options.topk,
        .scale = 1 / sqrtf(CSA_HEAD_SIZE),
        .workspace = e->workspace,
    };
}

static int plan_prefill(engine *e, int64_t requests)
{
    int64_t last = 0;
    for (int64_t i = 0; i < e->count; i++)
        last = e->positions[i] > last ? e->positions[i] : last;
    csa_plan_args args = {.size = sizeof args,
                          .positions = e->positions,
                          .tokens = e->count,
                          .requests = requests,
                          .regions = last / CSA_REGION + 1,
                          .groups = (int32_t)e->groups,
                          .topk = (int32_t)e->options.topk};
    set_width(e, args.regions);
    csa_status status = csa_plan_prefill(e->context, &args, &e->plan);
    return status ? tool_library_error("run", "csa_plan_prefill", status) : TOOL_OK;
}

int engine_prefill(engine *e, int64_t first, int64_t count)
{
    int64_t prompt = e->source->options.prompt, request = first / prompt, requests = 0;
    e->count = count;
    for (int64_t i = 0; i < count; i++) {
        int64_t owner = (first + i) / prompt;
        place_token(e, i, (generate_place){.request = owner, .position = (first + i) % prompt});
        while (requests <= owner - request)
            e->query_start[requests++] = (int32_t)i;
        e->length[owner] = e->positions[i] + 1;
    }
    e->query_start[requests] = (int32_t)count;
    generate_tokens(e->source, e->places, count, &e->in);
    double start = tool_seconds();
    int code = plan_prefill(e, requests);
    if (code != TOOL_OK)
        return code;
    describe_tokens(e, request, requests);
    e->tokens.query_start = csa_tensor_1d(e->query_start, CSA_I32, requests + 1);
    csa_prepare_args prepare = prepare_args(e);
    csa_layer_args args = layer_args(e, &prepare);
    csa_status status = csa_layer(e->context, e->plan, &args);
    e->seconds = tool_seconds() - start;
    return status ? tool_library_error("run", "csa_layer", status) : TOOL_OK;
}

int64_t engine_accepted(const engine *e, int64_t request)
{
    int64_t accepted = 1;
    while (accepted < e->options.query_len && !e->places[request * e->options.query_len + accepted].wrong)
        accepted++;
    return accepted;
}

int64_t engine_advance(engine *e)
{
    int64_t accepted = 0;
    for (int64_t r = 0; r < e->requests; r++) {
        e->length[r] += engine_accepted(e, r);
        accepted += engine_accepted(e, r);
    }
    return accepted;
}

int engine_decode(engine *e)
{
    int64_t query_len = e->options.query_len;
    e->count = e->requests * query_len;
    for (int64_t i = 0; i < e->count; i++) {
        int64_t r = i / query_len, draft = i % query_len;
        bool right = draft == 0 || generate_accepts(e->source, r, e->length[r], draft);
        place_token(e, i, (generate_place){r, e->length[r] + draft, !right});
    }
    generate_tokens(e->source, e->places, e->count, &e->in);
    double start = tool_seconds();
    describe_tokens(e, 0, e->requests);
    e->tokens.query_len = (int32_t)query_len;
    set_width(e, e->columns * (e->block_size / CSA_REGION));
    csa_prepare_args prepare = prepare_args(e);
    csa_layer_args args = layer_args(e, &prepare);
    csa_status status = csa_layer(e->context, NULL, &args);
    e->seconds = tool_seconds() - start;
    return status ? tool_library_error("run", "csa_layer", status) : TOOL_OK;
}

int engine_attend_again(engine *e)
{
    csa_prepare_args prepare = prepare_args(e);
    csa_layer_args layer = layer_args(e, &prepare);
    csa_step_args args = {.size = sizeof args,
                          .tokens = &e->tokens,
                          .cache = &e->cache,
                          .index_query = prepare.index_query_out,
                          .index_weights = prepare.index_weights_out,
                          .query = prepare.query_out,
                          .gate = layer.gate,
                          .out = layer.out,
                          .topk = layer.topk,
                          .scale = layer.scale,
                          .workspace = layer.workspace};
    args.out.data = e->again;
    double start = tool_seconds();
    csa_status status = csa_decode(e->context, &args);
    e->seconds = tool_seconds() - start;
    return status ? tool_library_error("run", "csa_decode", status) : TOOL_OK;
}

/* ---- For those who compare ---------------------------------------------------------------------- */

dense_step engine_dense_step(const engine *e, int64_t token)
{
    return (dense_step){
        .kv = e->kv,
        .table = e->table + e->places[token].request * e->columns,
        .groups = e->groups,
        .heads = e->heads,
        .block_size = e->block_size,
        .position = e->positions[token],
        .scale = 1 / sqrtf(CSA_HEAD_SIZE),
        .threads = csa_context_threads(e->context),
        .e4m3 = e->options.e4m3,
        .kv_scale = e->kv_scale,
    };
}

/* A value of the cache as bf16. */
static uint16_t cache_value(const engine *e, int64_t at)
{
    if (!e->options.e4m3)
        return ((const uint16_t *)e->kv)[at];
    return e->codes[((const uint8_t *)e->kv)[at]];
}

void engine_gather(const engine *e, int64_t request, int64_t count, uint16_t *key, uint16_t *value)
{
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < count * e->groups; row++) {
        int64_t slot = engine_slot(e, request, row / e->groups), block = slot / e->block_size;
        int64_t at = ((block * e->groups + row % e->groups) * e->block_size + slot % e->block_size);
        for (int64_t i = 0; i < CSA_HEAD_SIZE; i++) {
            key[row * CSA_HEAD_SIZE + i] = cache_value(e, at * CSA_KV_SIZE + i);
            value[row * CSA_HEAD_SIZE + i] = cache_value(e, at * CSA_KV_SIZE + CSA_HEAD_SIZE + i);
        }
    }
}
