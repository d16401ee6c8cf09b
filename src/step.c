/* SPDX-License-Identifier: Apache-2.0 */
#include "step.h"
#include "tokens.h"

/* ---- Score, select, attend on one chunk --------------------------------------------------------- */

/* Tokens [first, first + count) of a step, said by token, in the chunk's scratch. */
static csa_tokens resolve(const csa_tokens *all, int64_t first, int64_t count, const csa_chunk_arrays *scratch)
{
    for (int64_t i = 0; i < count; i++) {
        bool active = csa_token_active(all, first + i);
        scratch->positions[i] = active ? csa_token_position(all, first + i) : -1;
        scratch->owners[i] = csa_token_owner(all, first + i);
    }
    return (csa_tokens){
        .size = sizeof(csa_tokens),
        .block_table = all->block_table,
        .positions = csa_tensor_1d(scratch->positions, CSA_I64, count),
        .owners = csa_tensor_1d(scratch->owners, CSA_I64, count),
        .query_len = 1,
    };
}

csa_rows csa_slice_rows(const csa_rows *all, int64_t first, int64_t count)
{
    csa_rows none = {.size = sizeof none};
    if (!all)
        return none;
    return (csa_rows){
        .size = sizeof(csa_rows),
        .active = csa_slice(all->active, first, count),
        .positions = csa_slice(all->positions, first, count),
        .current = csa_slice(all->current, first, count),
        .lengths = csa_slice(all->lengths, first, count),
        .topk_lengths = csa_slice(all->topk_lengths, first, count),
    };
}

static csa_status run_chunk(const csa_context *context, const csa_step_args *a, const csa_chunk *chunk)
{
    int64_t first = chunk->first, count = chunk->count, groups = a->query.shape[1], rows = count * groups;
    const csa_chunk_arrays *scratch = &chunk->scratch;
    csa_tokens tokens = resolve(a->tokens, first, count, scratch);
    csa_rows rows_out = csa_slice_rows(a->rows_out, first * groups, rows);
    if (!csa_present(&rows_out.current))
        rows_out.current = csa_tensor_1d(scratch->current, CSA_I64, rows);
    csa_score_args score = {
        .tokens = &tokens,
        .cache = a->cache,
        .query = csa_slice(a->index_query, first, count),
        .weights = csa_slice(a->index_weights, first, count),
        .rows_out = &rows_out,
        .stream = a->stream,
    };
    csa_select_args select = {
        .scores = csa_tensor_2d(NULL, CSA_F32, rows, chunk->regions),
        .current = rows_out.current,
        .selected = csa_slice(a->selected, first * groups, rows),
        .topk = a->topk,
        .stream = a->stream,
    };
    if (!csa_present(&select.selected))
        select.selected = csa_tensor_2d(scratch->selected, CSA_I64, rows, csa_list_columns(chunk->shape));
    if (chunk->regions > a->topk) {
        select.scores.data = scratch->scores;
        score.scores = select.scores;
    }
    csa_attend_args attend = {
        .tokens = &tokens,
        .cache = a->cache,
        .query = csa_slice(a->query, first, count),
        .selected = select.selected,
        .gate = csa_slice(a->gate, first, count),
        .out = csa_slice(a->out, first, count),
        .lse = csa_slice(a->lse, first, count),
        .scale = a->scale,
        .stream = a->stream,
    };
    csa_status status = context->stages->score(context, &score);
    if (status == CSA_OK)
        status = context->stages->select(context, &select);
    return status == CSA_OK ? context->stages->attend(context, &attend) : status;
}

csa_step_shape csa_shape_of(const csa_context *context, int64_t tokens, int64_t groups, int64_t regions,
                            int64_t topk)
{
    csa_step_shape shape = {tokens, groups, regions, topk, context->scratch_limit, context->cuda != NULL};
    return shape;
}

csa_status csa_run_chunks(const csa_context *context, const csa_plan *plan, const csa_step_args *args,
                          csa_run_chunk run)
{
    csa_step_shape shape =
        csa_shape_of(context, args->query.shape[0], args->query.shape[1], args->regions, args->topk);
    if (shape.tokens == 0)
        return CSA_OK;
    csa_chunk chunk = {.shape = &shape, .scratch = csa_lay_out_chunk(&shape, args->workspace.data)};
    int64_t chunk_tokens = csa_chunk_tokens(&shape);
    csa_status status = CSA_OK;
    for (int64_t number = 0; chunk.first < shape.tokens && status == CSA_OK; number++) {
        int64_t left = shape.tokens - chunk.first;
        chunk.count = left < chunk_tokens ? left : chunk_tokens;
        chunk.regions = plan ? plan->chunk_regions[number] : args->regions;
        status = run(context, args, &chunk);
        chunk.first += chunk_tokens;
    }
    return status;
}

csa_status csa_host_step(const csa_context *context, const csa_plan *plan, const csa_step_args *args)
{
    return csa_run_chunks(context, plan, args, run_chunk);
}

/* ---- A whole layer ------------------------------------------------------------------------------ */

csa_tokens csa_prefill_part(const csa_tokens *tokens, const csa_plan *plan)
{
    csa_tokens part = *tokens;
    int64_t count = plan->shape.tokens, requests = plan->requests;
    part.slots = csa_slice(part.slots, 0, count);
    part.positions = csa_slice(part.positions, 0, count);
    part.owners = csa_slice(part.owners, 0, count);
    part.block_table = csa_slice(part.block_table, 0, requests);
    part.ring_base = csa_slice(part.ring_base, 0, requests);
    part.seq_lens = csa_slice(part.seq_lens, 0, requests);
    part.query_start = csa_slice(part.query_start, 0, requests + 1);
    return part;
}

csa_tokens csa_decode_part(const csa_tokens *tokens, const csa_plan *plan, int64_t all_tokens)
{
    csa_tokens part = *tokens, absent = {0};
    if (!plan)
        return part;
    int64_t first = plan->shape.tokens, count = all_tokens - first;
    int64_t first_request = plan->requests, requests = csa_token_requests(tokens) - first_request;
    part.slots = csa_slice(part.slots, first, count);
    part.positions = csa_slice(part.positions, first, count);
    part.block_table = csa_slice(part.block_table, first_request, requests);
    part.ring_base = csa_slice(part.ring_base, first_request, requests);
    part.seq_lens = csa_slice(part.seq_lens, first_request, requests);
    part.owners = absent.owners; /* query_len tokens per request say the same */
    part.query_start = absent.query_start;
    return part;
}

static csa_status summarize(const csa_context *context, const csa_plan *plan, const csa_summarize_args *args)
{
    const csa_stages *stages = context->stages;
    return plan                          ? stages->summarize_prefill(context, args)
           : args->tokens->query_len > 1 ? stages->summarize_verify(context, args)
                                         : stages->summarize_decode(context, args);
}

/* Summarize and step on tokens [first, first + count), which `tokens` describes; `unprepared`:
 * prepare, too. */
static csa_status run_part(const csa_context *context, const csa_plan *plan, const csa_layer_args *a,
                           const csa_tokens *tokens, int64_t first, int64_t count, bool unprepared)
{
    const csa_prepare_args *p = a->prepare;
    int64_t groups = p->query.shape[1];
    csa_rows rows_out = csa_slice_rows(a->rows_out, first * groups, count * groups);
    csa_summarize_args rows = {
        .tokens = tokens,
        .cache = p->cache,
        .key = csa_slice(p->index_key_out, first, count),
        .z = csa_slice(a->z, first, count),
        .metadata = plan ? a->metadata : (csa_tensor){0},
        .stream = p->stream,
    };
    csa_step_args step = {
        .tokens = tokens,
        .cache = p->cache,
        .index_query = csa_slice(p->index_query_out, first, count),
        .index_weights = csa_slice(p->index_weights_out, first, count),
        .query = csa_slice(p->query_out, first, count),
        .gate = csa_slice(a->gate, first, count),
        .out = csa_slice(a->out, first, count),
        .lse = csa_slice(a->lse, first, count),
        .rows_out = a->rows_out ? &rows_out : NULL,
        .selected = csa_slice(a->selected, first * groups, count * groups),
        .regions = a->regions,
        .topk = a->topk,
        .scale = a->scale,
        .workspace = a->workspace,
        .stream = p->stream,
    };
    const csa_stages *stages = context->stages;
    csa_status status =
        unprepared ? stages->prepare_and_summarize(context, p, &rows) : summarize(context, plan, &rows);
    return status == CSA_OK ? stages->step(context, plan, &step) : status;
}

csa_status csa_host_layer(const csa_context *context, const csa_plan *plan, const csa_layer_args *args)
{
    const csa_tokens *all = args->prepare->tokens;
    int64_t tokens = args->prepare->query.shape[0], prefill = plan ? plan->shape.tokens : 0;
    bool fused = !plan && context->stages->prepare_and_summarize;
    csa_status status = fused ? CSA_OK : context->stages->prepare(context, args->prepare);
    if (status == CSA_OK && plan) {
        csa_tokens part = csa_prefill_part(all, plan);
        status = run_part(context, plan, args, &part, 0, prefill, false);
    }
    if (status == CSA_OK && tokens > prefill) {
        csa_tokens part = csa_decode_part(all, plan, tokens);
        status = run_part(context, NULL, args, &part, prefill, tokens - prefill, fused);
    }
    return status;
}
