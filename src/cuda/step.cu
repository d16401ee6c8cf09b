/*
 * Whole steps: score, select and attend queued one behind the other, chunk by chunk. Where a device allows it,
 * select and attend start while the kernel ahead ends, and wait before they read what that one wrote. The first
 * kernel of a step does not: what it reads before it would wait may be what the caller's kernel ahead writes.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "../step.h"
#include "../tensor.h"
#include "launch.h"
#include "stages.h"

namespace
{

csa_status run_chunk(const csa_context *context, const csa_step_args *a, const csa_chunk *chunk)
{
    const csa_step_shape *shape = chunk->shape;
    int64_t groups = a->query.shape[1], first_row = chunk->first * groups, rows = chunk->count * groups;
    csa_rows rows_out = csa_slice_rows(a->rows_out, first_row, rows);
    csa_ranking ranking = {chunk->first, chunk->count, a->rows_out || chunk->regions > a->topk};
    ranking.peaks = csa_tensor_2d(chunk->scratch.peaks, CSA_F32, rows, csa_peak_stride(shape));
    ranking.counters = chunk->scratch.counters;
    ranking.records = chunk->scratch.records;
    ranking.most_records = csa_most_records(shape);
    csa_score_args score = {};
    score.tokens = a->tokens;
    score.cache = a->cache;
    score.query = csa_slice(a->index_query, chunk->first, chunk->count);
    score.weights = csa_slice(a->index_weights, chunk->first, chunk->count);
    score.rows_out = a->rows_out ? &rows_out : nullptr;
    score.stream = a->stream;
    csa_select_args select = {};
    select.scores = csa_tensor_2d(chunk->scratch.scores, CSA_F32, rows, chunk->regions);
    select.scores.stride[0] = csa_score_stride(shape);
    select.selected = csa_slice(a->selected, first_row, rows);
    if (!csa_present(&select.selected))
        select.selected = csa_tensor_2d(chunk->scratch.selected, CSA_I64, rows, csa_list_columns(shape));
    select.topk = a->topk;
    select.stream = a->stream;
    if (chunk->regions > a->topk)
        score.scores = select.scores;
    csa_attend_args attend = {};
    attend.tokens = a->tokens;
    attend.cache = a->cache;
    attend.query = csa_slice(a->query, chunk->first, chunk->count);
    attend.selected = select.selected;
    attend.gate = csa_slice(a->gate, chunk->first, chunk->count);
    attend.out = csa_slice(a->out, chunk->first, chunk->count);
    attend.lse = csa_slice(a->lse, chunk->first, chunk->count);
    attend.scale = a->scale;
    attend.stream = a->stream;
    csa_status status = csa_cuda_score_in_step(context, &score, &ranking, select.selected.shape[1] - 1);
    if (status == CSA_OK)
        status = csa_cuda_select_in_step(context, &select, a->tokens, &ranking);
    return status == CSA_OK ? csa_cuda_attend_in_step(context, &attend, &ranking) : status;
}

} // namespace

csa_status csa_cuda_step(const csa_context *context, const csa_plan *plan, const csa_step_args *args)
{
    return csa_run_chunks(context, plan, args, run_chunk);
}
