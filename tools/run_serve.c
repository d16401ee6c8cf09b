/*
 * Serving a recorded context through the library.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "run_serve.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

enum {
    SPARE_BLOCKS = 3, /* of other requests, as it were: full of NaN */
    RING_CAPACITY = CSA_REGION - 1,
    WORKSPACE_ALIGNMENT = 256
};

static int64_t rows(const serve *s)
{
    return s->source->groups * s->source->heads;
}

/* ---- Memory ------------------------------------------------------------------------------------- */

static bool allocate(serve *s)
{
    const run_context *c = s->source;
    size_t kv = (size_t)(s->blocks * c->groups * s->block_size), tokens = (size_t)c->tokens;
    s->kv = calloc(kv, CSA_KV_SIZE * sizeof *s->kv);
    s->summaries = calloc((size_t)(s->blocks * (s->block_size / CSA_REGION)), CSA_SUMMARY_SIZE);
    s->ring = calloc(RING_CAPACITY, CSA_RING_SIZE * sizeof *s->ring);
    s->table = calloc((size_t)s->blocks, sizeof *s->table);
    s->slots = calloc(tokens, sizeof *s->slots);
    s->positions = calloc(tokens, sizeof *s->positions);
    s->z = calloc(tokens, CSA_SUMMARY_SIZE * sizeof *s->z);
    s->query = calloc((size_t)(c->queries * rows(s)), CSA_HEAD_SIZE * sizeof *s->query);
    s->out = calloc((size_t)rows(s), CSA_HEAD_SIZE * sizeof *s->out);
    s->selected = calloc((size_t)c->groups * (CSA_MAX_TOPK + 1), sizeof *s->selected);
    return s->kv && s->summaries && s->ring && s->table && s->slots && s->positions && s->z && s->query &&
           s->out && s->selected;
}

/* A fixed permutation of the blocks, so that neighbouring tokens lie far apart. The spare ones come last. */
static void shuffle_blocks(serve *s)
{
    uint64_t state = 1;
    for (int64_t i = 0; i < s->blocks; i++) {
        state = state * 6364136223846793005U + 1442695040888963407U;
        int64_t other = (int64_t)((state >> 33) % (uint64_t)(i + 1));
        s->table[i] = s->table[other];
        s->table[other] = (int32_t)i;
    }
}

static void number_tokens(serve *s)
{
    for (int64_t i = 0; i < s->source->tokens; i++) {
        s->positions[i] = i;
        s->slots[i] = s->table[i / s->block_size] * s->block_size + i % s->block_size;
    }
}

static void pad_head(const uint16_t *from, int64_t size, uint16_t *to)
{
    memcpy(to, from, (size_t)size * sizeof *to);
    memset(to + size, 0, (size_t)(CSA_HEAD_SIZE - size) * sizeof *to);
}

/* What no token of the request fills stays NaN, and must not show in any result. */
static void fill_cache(serve *s)
{
    const run_context *c = s->source;
    int64_t per_block = c->groups * s->block_size * CSA_KV_SIZE, size = c->head_size;
    memset(s->kv, 0xFF, (size_t)(s->blocks * per_block) * sizeof *s->kv);
    memset(s->summaries, 0x7F, (size_t)(s->blocks * (s->block_size / CSA_REGION) * CSA_SUMMARY_SIZE));
    memset(s->ring, 0xFF, (size_t)(RING_CAPACITY * CSA_RING_SIZE) * sizeof *s->ring);
    for (int64_t i = 0; i < c->tokens * c->groups; i++) {
        int64_t slot = s->slots[i / c->groups], group = i % c->groups, block = slot / s->block_size;
        uint16_t *row =
            s->kv + block * per_block + (group * s->block_size + slot % s->block_size) * CSA_KV_SIZE;
        pad_head(c->key + i * size, size, row);
        pad_head(c->value + i * size, size, row + CSA_HEAD_SIZE);
    }
}

/* ---- What stays the same over all steps --------------------------------------------------------- */

static void describe_cache(serve *s)
{
    int64_t regions = s->block_size / CSA_REGION;
    s->cache = (csa_cache){
        .size = sizeof s->cache,
        .kv = csa_tensor_4d(s->kv, CSA_BF16, s->blocks, s->source->groups, s->block_size, CSA_KV_SIZE),
        .summaries = csa_tensor_3d(s->summaries, CSA_E4M3, s->blocks, regions, CSA_SUMMARY_SIZE),
        .ring = csa_tensor_2d(s->ring, CSA_BF16, RING_CAPACITY, CSA_RING_SIZE),
        .ring_capacity = RING_CAPACITY,
    };
    s->tokens = (csa_tokens){
        .size = sizeof s->tokens,
        .block_table = csa_tensor_2d(s->table, CSA_I32, 1, s->columns),
        .ring_base = csa_tensor_1d(&s->ring_base, CSA_I64, 1),
    };
}

/* A topk that spans all regions needs no scores, so that a smaller one may need more: the largest need counts.
 */
static int size_workspace(serve *s, const csa_context_options *options, const serve_options *o,
                          csa_serving *most)
{
    csa_serving serving = {
        .size = sizeof serving,
        .regions = s->columns * (s->block_size / CSA_REGION),
        .decode_tokens = 1,
        .groups = (int32_t)s->source->groups,
        .heads = (int32_t)s->source->heads,
        .index_heads = (int32_t)s->source->index_heads,
        .block_size = (int32_t)s->block_size,
    };
    for (int64_t i = 0; i < o->topk_count; i++) {
        size_t bytes;
        serving.topk = (int32_t)o->topk[i];
        csa_status status = csa_workspace_size(options, &serving, &bytes);
        if (status)
            return tool_library_error(s->subcommand, "csa_workspace_size", status);
        if (i == 0 || bytes > s->workspace.bytes) {
            s->workspace.bytes = bytes;
            *most = serving;
        }
    }
    return TOOL_OK;
}

static int make_workspace(serve *s, const csa_context_options *options, const serve_options *o)
{
    csa_serving most = {0};
    int code = size_workspace(s, options, o, &most);
    if (code != TOOL_OK)
        return code;
    size_t units = s->workspace.bytes / WORKSPACE_ALIGNMENT + 1;
    s->workspace.data = aligned_alloc(WORKSPACE_ALIGNMENT, units * WORKSPACE_ALIGNMENT);
    if (!s->workspace.data)
        return tool_fail(TOOL_INTERNAL, s->subcommand, "no memory for a workspace of %zu bytes",
                         s->workspace.bytes);
    csa_status status = csa_warm_up(s->context, &most, s->workspace);
    return status ? tool_library_error(s->subcommand, "csa_warm_up", status) : TOOL_OK;
}

static int make_context(serve *s, const serve_options *o)
{
    csa_context_options options = {
        .size = sizeof options, .backend = o->backend, .threads = o->threads, .tier = o->tier};
    csa_status status = csa_context_create(&options, &s->context);
    if (status)
        return tool_library_error(s->subcommand, "csa_context_create", status);
    if (csa_context_backend(s->context) == CSA_BACKEND_CUDA)
        return tool_fail(TOOL_UNSUPPORTED, s->subcommand,
                         "the cuda back end is not supported by this command yet");
    return make_workspace(s, &options, o);
}

int serve_open(serve *s, const run_context *source, const serve_options *o)
{
    *s = (serve){.subcommand = o->subcommand, .source = source, .block_size = o->block_size};
    s->columns = (source->tokens - 1) / o->block_size + 1;
    s->blocks = s->columns + SPARE_BLOCKS;
    if (!allocate(s))
        return tool_fail(TOOL_INTERNAL, s->subcommand, "no memory for a cache of %" PRId64 " tokens",
                         source->tokens);
    shuffle_blocks(s);
    number_tokens(s);
    fill_cache(s);
    for (int64_t i = 0; i < source->queries * rows(s); i++)
        pad_head(source->query + i * source->head_size, source->head_size, s->query + i * CSA_HEAD_SIZE);
    if (!o->plain_mean)
        memcpy(s->z, source->z, (size_t)source->tokens * CSA_SUMMARY_SIZE * sizeof *s->z);
    describe_cache(s);
    return make_context(s, o);
}

void serve_close(serve *s)
{
    csa_context_destroy(s->context);
    free(s->workspace.data);
    free(s->kv);
    free(s->summaries);
    free(s->ring);
    free(s->table);
    free(s->slots);
    free(s->positions);
    free(s->z);
    free(s->query);
    free(s->out);
    free(s->selected);
}

/* ---- Steps -------------------------------------------------------------------------------------- */

static void stand_at(serve *s, int64_t first, int64_t count)
{
    s->tokens.slots = csa_tensor_1d(s->slots + first, CSA_I64, count);
    s->tokens.positions = csa_tensor_1d(s->positions + first, CSA_I64, count);
}

static csa_summarize_args summarize_args(const serve *s, int64_t first, int64_t count)
{
    int64_t at = first * CSA_SUMMARY_SIZE;
    return (csa_summarize_args){
        .size = sizeof(csa_summarize_args),
        .tokens = &s->tokens,
        .cache = &s->cache,
        .key = csa_tensor_2d(s->source->index_key + at, CSA_BF16, count, CSA_SUMMARY_SIZE),
        .z = csa_tensor_2d(s->z + at, CSA_BF16, count, CSA_SUMMARY_SIZE),
    };
}

int serve_prefill(serve *s, int64_t first, int64_t count)
{
    int32_t query_start[2] = {0, (int32_t)count};
    stand_at(s, first, count);
    s->tokens.query_start = csa_tensor_1d(query_start, CSA_I32, 2);
    csa_summarize_args args = summarize_args(s, first, count);
    csa_status status = csa_summarize_prefill(s->context, &args);
    s->tokens.query_start = (csa_tensor){0};
    return status ? tool_library_error(s->subcommand, "csa_summarize_prefill", status) : TOOL_OK;
}

int serve_summarize(serve *s, int64_t query)
{
    int64_t position = run_context_position(s->source, query);
    stand_at(s, position, 1);
    csa_summarize_args args = summarize_args(s, position, 1);
    csa_status status = csa_summarize_decode(s->context, &args);
    return status ? tool_library_error(s->subcommand, "csa_summarize_decode", status) : TOOL_OK;
}

int serve_decode(serve *s, int64_t query, int64_t topk)
{
    const run_context *c = s->source;
    int64_t index_rows = c->groups * c->index_heads, regions = s->columns * (s->block_size / CSA_REGION);
    const uint8_t *index_query = c->index_query + query * index_rows * CSA_SUMMARY_SIZE;
    const uint16_t *q = s->query + query * rows(s) * CSA_HEAD_SIZE;
    stand_at(s, run_context_position(c, query), 1);
    s->selected_width = (topk < regions ? topk : regions) + 1;
    csa_step_args args = {
        .size = sizeof args,
        .tokens = &s->tokens,
        .cache = &s->cache,
        .index_query = csa_tensor_4d(index_query, CSA_E4M3, 1, c->groups, c->index_heads, CSA_SUMMARY_SIZE),
        .index_weights =
            csa_tensor_3d(c->index_weights + query * index_rows, CSA_F32, 1, c->groups, c->index_heads),
        .query = csa_tensor_4d(q, CSA_BF16, 1, c->groups, c->heads, CSA_HEAD_SIZE),
        .out = csa_tensor_4d(s->out, CSA_BF16, 1, c->groups, c->heads, CSA_HEAD_SIZE),
        .selected = csa_tensor_2d(s->selected, CSA_I64, c->groups, s->selected_width),
        .topk = (int32_t)topk,
        .scale = c->scale,
        .workspace = s->workspace,
    };
    csa_status status = csa_decode(s->context, &args);
    return status ? tool_library_error(s->subcommand, "csa_decode", status) : TOOL_OK;
}

int serve_score(serve *s, int64_t query, int64_t regions, float *scores)
{
    const run_context *c = s->source;
    int64_t index_rows = c->groups * c->index_heads;
    const uint8_t *index_query = c->index_query + query * index_rows * CSA_SUMMARY_SIZE;
    stand_at(s, run_context_position(c, query), 1);
    csa_score_args args = {
        .size = sizeof args,
        .tokens = &s->tokens,
        .cache = &s->cache,
        .query = csa_tensor_4d(index_query, CSA_E4M3, 1, c->groups, c->index_heads, CSA_SUMMARY_SIZE),
        .weights = csa_tensor_3d(c->index_weights + query * index_rows, CSA_F32, 1, c->groups, c->index_heads),
        .scores = csa_tensor_2d(scores, CSA_F32, c->groups, regions),
    };
    csa_status status = csa_score(s->context, &args);
    return status ? tool_library_error(s->subcommand, "csa_score", status) : TOOL_OK;
}

dense_step serve_dense_step(const serve *s, int64_t query)
{
    return (dense_step){
        .kv = s->kv,
        .table = s->table,
        .groups = s->source->groups,
        .heads = s->source->heads,
        .block_size = s->block_size,
        .position = run_context_position(s->source, query),
        .scale = s->source->scale,
        .threads = csa_context_threads(s->context),
    };
}
