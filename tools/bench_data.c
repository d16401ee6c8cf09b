/*
 * A synthetic layer for `csa bench`.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "bench_data.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

enum {
    SCORE_BYTES = 128 << 20, /* of scores held at once */
    BF16 = 2
};

static int64_t ring_capacity(const cost_model *m)
{
    int64_t drafts = CSA_REGION - 2 + m->query_len;
    return drafts > CSA_REGION ? drafts : CSA_REGION;
}

/* ---- Laying out: what is taken here is filled by bench_fill_memory or by the functions further down --- */

static void derive(bench_data *d)
{
    const cost_model *m = &d->shape.model;
    d->prefill = d->shape.rows > 0;
    d->per_request = d->prefill ? d->shape.rows : m->query_len;
    d->count = m->batch * d->per_request;
    d->columns = (m->context - 1) / m->block_size + 1;
    d->regions = cost_regions(m);
    int64_t token = d->regions * m->groups * (int64_t)sizeof(float), most = SCORE_BYTES / token;
    most = most < 1 ? 1 : most;
    d->chunk = most < d->count ? most : d->count;
}

static void lay_out_tokens(bench_data *d)
{
    const cost_model *m = &d->shape.model;
    bench_memory *memory = &d->memory;
    d->table = bench_take(memory, BENCH_IDS, sizeof *d->table, m->batch, d->columns);
    d->query_start = bench_take(memory, BENCH_IDS, sizeof *d->query_start, m->batch + 1, 1);
    d->ring_base = bench_take(memory, BENCH_IDS, sizeof *d->ring_base, m->batch, 1);
    d->slots = bench_take(memory, BENCH_IDS, sizeof *d->slots, d->count, 1);
    d->positions = bench_take(memory, BENCH_IDS, sizeof *d->positions, d->count, 1);
    d->owners = bench_take(memory, BENCH_IDS, sizeof *d->owners, d->count, 1);
    d->current = bench_take(memory, BENCH_IDS, sizeof *d->current, d->count, m->groups);
    d->tokens = (csa_tokens){
        .size = sizeof d->tokens,
        .block_table = csa_tensor_2d(bench_there(memory, d->table), CSA_I32, m->batch, d->columns),
        .slots = csa_tensor_1d(bench_there(memory, d->slots), CSA_I64, d->count),
        .positions = csa_tensor_1d(bench_there(memory, d->positions), CSA_I64, d->count),
        .ring_base = csa_tensor_1d(bench_there(memory, d->ring_base), CSA_I64, m->batch),
        .query_len = d->prefill ? 0 : (int32_t)m->query_len,
    };
    if (d->prefill)
        d->tokens.query_start = csa_tensor_1d(bench_there(memory, d->query_start), CSA_I32, m->batch + 1);
}

static csa_tensor lay_out_kv(bench_data *d, int64_t blocks)
{
    const cost_model *m = &d->shape.model;
    size_t row = (size_t)CSA_KV_SIZE * (m->e4m3 ? 1 : BF16);
    bench_fill fill = m->e4m3 ? BENCH_E4M3 : BENCH_BF16;
    void *kv = bench_take(&d->memory, fill, row, blocks * m->groups, m->block_size);
    return csa_tensor_4d(kv, m->e4m3 ? CSA_E4M3 : CSA_BF16, blocks, m->groups, m->block_size, CSA_KV_SIZE);
}

static void lay_out_cache(bench_data *d)
{
    const cost_model *m = &d->shape.model;
    int64_t blocks = m->batch * d->columns, regions = m->block_size / CSA_REGION, ring = ring_capacity(m);
    void *summaries = bench_take(&d->memory, BENCH_E4M3, CSA_SUMMARY_SIZE, blocks, regions);
    void *rows = bench_take(&d->memory, BENCH_BF16, (size_t)CSA_RING_SIZE * BF16, m->batch, ring);
    d->cache = (csa_cache){
        .size = sizeof d->cache,
        .summaries = csa_tensor_3d(summaries, CSA_E4M3, blocks, regions, CSA_SUMMARY_SIZE),
        .ring = csa_tensor_2d(rows, CSA_BF16, m->batch * ring, CSA_RING_SIZE),
        .ring_capacity = ring,
    };
    if (d->parts.kv)
        d->cache.kv = lay_out_kv(d, blocks);
}

static csa_tensor bf16_4d(bench_data *d, bench_fill fill, int64_t heads, int64_t size)
{
    int64_t rows = d->count * d->shape.model.groups;
    void *values = bench_take(&d->memory, fill, (size_t)size * BF16, rows, heads);
    return csa_tensor_4d(values, CSA_BF16, d->count, d->shape.model.groups, heads, size);
}

static csa_tensor bf16_3d(bench_data *d, bench_fill fill, int64_t size)
{
    void *values = bench_take(&d->memory, fill, (size_t)size * BF16, d->count, d->shape.model.groups);
    return csa_tensor_3d(values, CSA_BF16, d->count, d->shape.model.groups, size);
}

static csa_tensor bf16_1d(bench_data *d, int64_t size)
{
    return csa_tensor_1d(bench_take(&d->memory, BENCH_BF16, BF16, size, 1), CSA_BF16, size);
}

static csa_tensor bf16_rows(bench_data *d, bench_fill fill, int64_t size)
{
    void *values = bench_take(&d->memory, fill, (size_t)size * BF16, d->count, 1);
    return csa_tensor_2d(values, CSA_BF16, d->count, size);
}

/* A table of one row that all positions share: what counts is that a row is read for each token. */
static csa_tensor rope_table(bench_data *d, int64_t size)
{
    csa_tensor table = csa_tensor_2d(bf16_1d(d, size).data, CSA_BF16, d->shape.model.context, size);
    table.stride[0] = 0;
    return table;
}

static csa_tensor index_query(bench_data *d, bench_fill fill)
{
    int64_t heads = cost_padded_heads(&d->shape.model), rows = d->count * d->shape.model.groups;
    void *values = bench_take(&d->memory, fill, CSA_SUMMARY_SIZE, rows, heads);
    return csa_tensor_4d(values, CSA_E4M3, d->count, d->shape.model.groups, heads, CSA_SUMMARY_SIZE);
}

static csa_tensor index_weights(bench_data *d, bench_fill fill)
{
    int64_t heads = cost_padded_heads(&d->shape.model), rows = d->count * d->shape.model.groups;
    void *values = bench_take(&d->memory, fill, sizeof(float), rows, heads);
    return csa_tensor_3d(values, CSA_F32, d->count, d->shape.model.groups, heads);
}

static void lay_out_prepare(bench_data *d)
{
    const cost_model *m = &d->shape.model;
    csa_prepare_args *p = &d->prepare;
    *p = (csa_prepare_args){.size = sizeof *p, .tokens = &d->tokens, .cache = &d->cache, .eps = 1e-5F};
    p->index_query = bf16_4d(d, BENCH_BF16, m->index_heads, CSA_SUMMARY_SIZE);
    p->index_key = bf16_rows(d, BENCH_BF16, CSA_SUMMARY_SIZE);
    p->index_weights = bf16_3d(d, BENCH_BF16, m->index_heads);
    p->index_query_norm = bf16_1d(d, CSA_SUMMARY_SIZE);
    p->index_key_norm = bf16_1d(d, CSA_SUMMARY_SIZE);
    p->index_key_bias = bf16_1d(d, CSA_SUMMARY_SIZE);
    p->index_rope = rope_table(d, CSA_INDEX_ROTARY);
    p->index_query_out = index_query(d, BENCH_EMPTY);
    p->index_key_out = bf16_rows(d, BENCH_BF16, CSA_SUMMARY_SIZE);
    p->index_weights_out = index_weights(d, BENCH_EMPTY);
    p->query = bf16_4d(d, BENCH_BF16, m->heads, CSA_HEAD_SIZE);
    p->key = bf16_3d(d, BENCH_BF16, CSA_HEAD_SIZE);
    p->value = bf16_3d(d, BENCH_BF16, CSA_HEAD_SIZE);
    p->query_norm = bf16_1d(d, CSA_HEAD_SIZE);
    p->key_norm = bf16_1d(d, CSA_HEAD_SIZE);
    p->rope = rope_table(d, CSA_HEAD_SIZE);
    p->query_out = bf16_4d(d, BENCH_EMPTY, m->heads, CSA_HEAD_SIZE);
    d->summarize = (csa_summarize_args){
        .size = sizeof d->summarize,
        .tokens = &d->tokens,
        .cache = &d->cache,
        .key = p->index_key_out,
        .z = bf16_rows(d, BENCH_BF16, CSA_SUMMARY_SIZE),
    };
}

static void lay_out_ranking(bench_data *d)
{
    const cost_model *m = &d->shape.model;
    int64_t width = m->topk < d->regions ? m->topk : d->regions, rows = d->count * m->groups;
    int64_t chunk = d->chunk * m->groups;
    d->score = (csa_score_args){
        .size = sizeof d->score,
        .tokens = &d->tokens,
        .cache = &d->cache,
        .query = index_query(d, d->prefill ? BENCH_TOPICS : BENCH_E4M3),
        .weights = index_weights(d, d->prefill ? BENCH_WEIGHTS : BENCH_SIGNED),
        .scores = csa_tensor_2d(bench_take(&d->memory, BENCH_EMPTY, sizeof(float), chunk, d->regions), CSA_F32,
                                chunk, d->regions),
    };
    d->select = (csa_select_args){
        .size = sizeof d->select,
        .scores = d->score.scores,
        .current = csa_tensor_1d(bench_there(&d->memory, d->current), CSA_I64, rows),
        .selected = csa_tensor_2d(bench_take(&d->memory, BENCH_EMPTY, sizeof(int64_t), rows, width + 1),
                                  CSA_I64, rows, width + 1),
        .topk = (int32_t)m->topk,
    };
}

static void lay_out_attention(bench_data *d)
{
    const cost_model *m = &d->shape.model;
    csa_tensor query = bf16_4d(d, BENCH_BF16, m->heads, CSA_HEAD_SIZE);
    csa_tensor gate = bf16_3d(d, BENCH_BF16, m->heads);
    csa_tensor out = bf16_4d(d, BENCH_EMPTY, m->heads, CSA_HEAD_SIZE);
    int64_t heads = m->groups * m->heads;
    d->gate = (csa_gate_args){
        .size = sizeof d->gate,
        .attention = csa_tensor_3d(query.data, CSA_BF16, d->count, heads, CSA_HEAD_SIZE),
        .gate = csa_tensor_2d(gate.data, CSA_BF16, d->count, heads),
        .out = csa_tensor_3d(out.data, CSA_BF16, d->count, heads, CSA_HEAD_SIZE),
    };
    if (!d->shape.gate)
        gate = (csa_tensor){0};
    d->attend = (csa_attend_args){
        .size = sizeof d->attend,
        .tokens = &d->tokens,
        .cache = &d->cache,
        .query = query,
        .selected = d->select.selected,
        .gate = gate,
        .out = out,
        .scale = 1 / sqrtf(CSA_HEAD_SIZE),
    };
}

static void lay_out_steps(bench_data *d, size_t workspace)
{
    void *scratch = bench_take(&d->memory, BENCH_EMPTY, 1, (int64_t)workspace, 1);
    d->step = (csa_step_args){
        .size = sizeof d->step,
        .tokens = &d->tokens,
        .cache = &d->cache,
        .index_query = d->score.query,
        .index_weights = d->score.weights,
        .query = d->attend.query,
        .gate = d->attend.gate,
        .out = d->attend.out,
        .topk = (int32_t)d->shape.model.topk,
        .scale = d->attend.scale,
        .workspace = {scratch, workspace},
    };
    d->attend.workspace = d->step.workspace;
    d->layer = (csa_layer_args){
        .size = sizeof d->layer,
        .prepare = &d->prepare,
        .z = d->summarize.z,
        .gate = d->attend.gate,
        .out = d->attend.out,
        .topk = d->step.topk,
        .scale = d->step.scale,
        .workspace = d->step.workspace,
    };
}

static void set_stream(bench_data *d, void *stream)
{
    d->prepare.stream = d->summarize.stream = d->score.stream = d->select.stream = stream;
    d->attend.stream = d->gate.stream = d->step.stream = stream;
}

static void lay_out(bench_data *d, size_t workspace)
{
    derive(d);
    lay_out_tokens(d);
    lay_out_cache(d);
    if (d->parts.prepare)
        lay_out_prepare(d);
    if (d->parts.ranked)
        lay_out_ranking(d);
    lay_out_attention(d);
    lay_out_steps(d, workspace);
    if (d->parts.dense)
        bench_lay_out_dense(d);
    if (d->memory.device)
        set_stream(d, d->memory.device->stream());
}

/* ---- What is not random, or not only ------------------------------------------------------------ */

/* A permutation of all blocks of all requests, so that neighbours lie far apart. */
static void shuffle_blocks(bench_data *d)
{
    int64_t blocks = d->shape.model.batch * d->columns;
    for (int64_t i = 0; i < blocks; i++) {
        int64_t other = (int64_t)(bench_random((uint64_t)i) % (uint64_t)(i + 1));
        d->table[i] = d->table[other];
        d->table[other] = (int32_t)i;
    }
}

void bench_stand(bench_data *d, int64_t back)
{
    const cost_model *m = &d->shape.model;
    int64_t first = m->context - d->per_request - back;
    first = first < 0 ? 0 : first; /* a context too short to go back in */
    for (int64_t t = 0; t < d->count; t++) {
        int64_t request = t / d->per_request, position = first + t % d->per_request;
        int64_t block = d->table[request * d->columns + position / m->block_size];
        d->positions[t] = position;
        d->slots[t] = block * m->block_size + position % m->block_size;
        d->owners[t] = request;
        for (int64_t g = 0; g < m->groups; g++)
            d->current[t * m->groups + g] = position / CSA_REGION;
    }
    bench_send_ids(&d->memory);
}

/* Zeros what follows the real heads of each row. */
static void clear_padding(bench_data *d, void *data, size_t head)
{
    int64_t rows = d->count * d->shape.model.groups, padded = cost_padded_heads(&d->shape.model);
    size_t pitch = (size_t)padded * head, kept = (size_t)d->shape.model.index_heads * head;
    char *first = (char *)data + kept;
    if (d->memory.device)
        d->memory.device->clear(first, pitch, pitch - kept, (size_t)rows);
    else
        for (int64_t row = 0; row < rows; row++)
            memset(first + (size_t)row * pitch, 0, pitch - kept);
}

/* Heads past the real ones are zero, as csa_prepare leaves them. */
static void pad_index_heads(bench_data *d)
{
    clear_padding(d, d->score.query.data, CSA_SUMMARY_SIZE);
    clear_padding(d, d->score.weights.data, sizeof(float));
}

static void fill(bench_data *d)
{
    const cost_model *m = &d->shape.model;
    bench_fill_memory(&d->memory, csa_context_threads(d->context));
    shuffle_blocks(d);
    for (int64_t request = 0; request <= m->batch; request++)
        d->query_start[request] = (int32_t)(request * d->per_request);
    for (int64_t request = 0; request < m->batch; request++)
        d->ring_base[request] = request * ring_capacity(m);
    bench_stand(d, 0);
    if (d->parts.ranked)
        pad_index_heads(d);
    if (d->parts.dense)
        bench_fill_dense(d);
}

/* ---- Opening ------------------------------------------------------------------------------------ */

csa_serving bench_serving(const bench_shape *shape)
{
    const cost_model *m = &shape->model;
    return (csa_serving){
        .size = sizeof(csa_serving),
        .regions = cost_regions(m),
        .decode_tokens = shape->rows ? 0 : m->batch * m->query_len,
        .prefill_tokens = m->batch * shape->rows,
        .groups = (int32_t)m->groups,
        .heads = (int32_t)m->heads,
        .index_heads = (int32_t)cost_padded_heads(m),
        .block_size = (int32_t)m->block_size,
        .topk = (int32_t)m->topk,
        .kv_dtype = m->e4m3 ? CSA_E4M3 : CSA_BF16,
    };
}

uint64_t bench_bytes(const bench_shape *shape, bench_parts parts, size_t workspace)
{
    bench_data d = {.shape = *shape, .parts = parts};
    lay_out(&d, workspace);
    return d.memory.bytes;
}

static int warm_up(bench_data *d)
{
    csa_serving serving = bench_serving(&d->shape);
    csa_status status = csa_warm_up(d->context, &serving, d->step.workspace);
    if (status)
        return tool_library_error("bench", "csa_warm_up", status);
    d->plan_args = (csa_plan_args){
        .size = sizeof d->plan_args,
        .positions = d->positions,
        .tokens = d->count,
        .requests = d->shape.model.batch,
        .regions = d->regions,
        .groups = (int32_t)d->shape.model.groups,
        .topk = (int32_t)d->shape.model.topk,
    };
    status = d->prefill ? csa_plan_prefill(d->context, &d->plan_args, &d->plan) : CSA_OK;
    return status ? tool_library_error("bench", "csa_plan_prefill", status) : TOOL_OK;
}

int bench_open(bench_data *d, const bench_shape *shape, bench_parts parts, const bench_setup *setup)
{
    *d = (bench_data){
        .shape = *shape, .parts = parts, .context = setup->context, .memory.device = setup->device};
    lay_out(d, setup->workspace);
    uint64_t bytes = d->memory.bytes;
    if (!bench_allocate(&d->memory))
        return tool_fail(TOOL_INTERNAL, "bench", "no memory for %" PRIu64 " bytes", bytes);
    lay_out(d, setup->workspace);
    fill(d);
    int code = setup->device ? bench_device_check(setup->device) : TOOL_OK;
    return code == TOOL_OK ? warm_up(d) : code;
}

void bench_close(bench_data *d)
{
    csa_plan_destroy(d->plan);
    d->plan = NULL;
    bench_free(&d->memory);
}

/* ---- Chunks ------------------------------------------------------------------------------------- */

static csa_tensor rows_of(csa_tensor t, int64_t first, int64_t count, size_t item)
{
    t.data = (char *)t.data + (size_t)(first * t.stride[0]) * item;
    t.shape[0] = count;
    return t;
}

void bench_chunk_at(const bench_data *d, int64_t first, bench_chunk *c)
{
    int64_t groups = d->shape.model.groups, count = d->chunk < d->count - first ? d->chunk : d->count - first;
    c->end = first + count;
    c->tokens = d->tokens;
    c->score = d->score;
    c->select = d->select;
    c->score.scores.shape[0] = c->select.scores.shape[0] = count * groups;
    c->select.current = rows_of(d->select.current, first * groups, count * groups, sizeof(int64_t));
    c->select.selected = rows_of(d->select.selected, first * groups, count * groups, sizeof(int64_t));
    if (count == d->count)
        return;
    c->tokens = (csa_tokens){
        .size = sizeof c->tokens,
        .block_table = d->tokens.block_table,
        .positions = rows_of(d->tokens.positions, first, count, sizeof(int64_t)),
        .owners = csa_tensor_1d(bench_there(&d->memory, d->owners + first), CSA_I64, count),
    };
    c->score.tokens = &c->tokens;
    c->score.query = rows_of(d->score.query, first, count, 1);
    c->score.weights = rows_of(d->score.weights, first, count, sizeof(float));
}
