/* SPDX-License-Identifier: Apache-2.0 */
#include "plan.h"

enum { ALIGNMENT = 64, ARRAYS = 7, GAPS = ALIGNMENT * ARRAYS };

int64_t csa_list_columns(const csa_step_shape *shape)
{
    return (shape->topk < shape->regions ? shape->topk : shape->regions) + 1;
}

bool csa_step_ranks(const csa_step_shape *shape)
{
    return shape->regions > shape->topk;
}

int64_t csa_score_stride(const csa_step_shape *shape)
{
    return shape->cuda ? (shape->regions + 3) / 4 * 4 : shape->regions; /* there, four are read at a time */
}

int64_t csa_peak_stride(const csa_step_shape *shape)
{
    return shape->cuda && shape->regions > CSA_SHORT_ROW ? (csa_score_stride(shape) / CSA_PEAK + 4) / 4 * 4 : 0;
}

int64_t csa_peak_rows(const csa_step_shape *shape, int64_t rows)
{
    return shape->regions > CSA_LONG_ROW || rows < CSA_PEAK_ROWS ? rows : CSA_PEAK_ROWS;
}

/* Peaks of a chunk of so many tokens. */
static size_t peak_bytes(const csa_step_shape *shape, int64_t tokens)
{
    if (!csa_step_ranks(shape))
        return 0;
    return sizeof(float) * (size_t)(csa_peak_rows(shape, tokens * shape->groups) * csa_peak_stride(shape));
}

/* Scratch of one token: its position and owner; for each of its rows the current region, a selection and, where
 * there is a choice, scores. */
static size_t token_bytes(const csa_step_shape *shape)
{
    size_t row = sizeof(int64_t) * (1 + (size_t)csa_list_columns(shape));
    if (csa_step_ranks(shape))
        row += sizeof(float) * (size_t)csa_score_stride(shape);
    return 2 * sizeof(int64_t) + (size_t)shape->groups * row;
}

/* Scratch of a chunk but for parts. */
static size_t chunk_bytes(const csa_step_shape *shape)
{
    int64_t tokens = csa_chunk_tokens(shape);
    return GAPS + (size_t)tokens * token_bytes(shape) + peak_bytes(shape, tokens);
}

/* Tokens of so many bytes each that fit the limit beside others; at least 1. */
static int64_t fitting_tokens(const csa_step_shape *shape, size_t others, size_t each)
{
    return shape->limit > others + each ? (int64_t)((shape->limit - others) / each) : 1;
}

int64_t csa_chunk_tokens(const csa_step_shape *shape)
{
    size_t one = token_bytes(shape);
    int64_t most = fitting_tokens(shape, GAPS, one + peak_bytes(shape, 1));
    if (shape->regions <= CSA_LONG_ROW) { /* where not all rows have peaks */
        int64_t more = fitting_tokens(shape, GAPS + peak_bytes(shape, CSA_PEAK_ROWS), one);
        most = most > more ? most : more;
    }
    if (most >= shape->tokens && shape->tokens >= 1)
        return shape->tokens;
    bool waves = shape->cuda && most * shape->groups > CSA_WAVE_ROWS;
    return waves ? most * shape->groups / CSA_WAVE_ROWS * CSA_WAVE_ROWS / shape->groups : most;
}

/* Parts of so many entries of all rows; none if a row would be one, which would only be read again. */
static int64_t parts_of(int64_t rows, int64_t columns, int64_t entries)
{
    return columns > entries ? rows * ((columns + entries - 1) / entries) : 0;
}

csa_cut csa_cut_rows(int64_t rows, int64_t columns, const csa_cut_limits *most)
{
    static const int64_t entries[] = {CSA_UNIT, CSA_QUAD, CSA_PIECE};
    const int64_t parts_at_most[] = {most->units, most->quads, most->records};
    for (int i = 0; i < 3 && rows <= most->rows; i++) {
        int64_t parts = parts_of(rows, columns, entries[i]);
        if (parts > 0 && parts <= parts_at_most[i] && parts <= most->records)
            return (csa_cut){entries[i], parts / rows};
    }
    return (csa_cut){0, 0};
}

/* The most that csa_cut_rows cuts rows into, of as many as the step has or fewer, on any GPU. */
static int64_t wanted_records(const csa_step_shape *shape)
{
    int64_t columns = csa_list_columns(shape), rows = CSA_CUT_ROWS;
    if (!shape->cuda)
        return 0;
    if (shape->tokens < rows && shape->tokens * shape->groups < rows)
        rows = shape->tokens * shape->groups;
    int64_t units = parts_of(rows, columns, CSA_UNIT), pieces = parts_of(rows, columns, CSA_PIECE);
    units = units < CSA_CUT_UNITS ? units : CSA_CUT_UNITS;
    return units > pieces ? units : pieces;
}

size_t csa_step_bytes(const csa_step_shape *shape)
{
    if (shape->tokens == 0)
        return 0;
    size_t bytes = chunk_bytes(shape), parts = (size_t)wanted_records(shape) * CSA_RECORD_BYTES;
    if (bytes >= shape->limit)
        return bytes;
    bool whole = csa_chunk_tokens(shape) == shape->tokens;
    return whole && parts < shape->limit - bytes ? bytes + parts : shape->limit;
}

int64_t csa_record_count(const csa_step_shape *shape)
{
    int64_t wanted = wanted_records(shape);
    if (wanted == 0) /* a step without tokens has no chunk */
        return 0;
    int64_t room = (int64_t)((csa_step_bytes(shape) - chunk_bytes(shape)) / CSA_RECORD_BYTES);
    return wanted < room ? wanted : room;
}

static void *carve(char **next, size_t bytes)
{
    char *start = *next;
    *next += (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    return start;
}

csa_chunk_arrays csa_lay_out_chunk(const csa_step_shape *shape, void *workspace)
{
    char *next = workspace;
    size_t tokens = (size_t)csa_chunk_tokens(shape), rows = tokens * (size_t)shape->groups;
    csa_chunk_arrays a;
    a.positions = carve(&next, tokens * sizeof *a.positions);
    a.owners = carve(&next, tokens * sizeof *a.owners);
    a.current = carve(&next, rows * sizeof *a.current);
    a.selected = carve(&next, rows * (size_t)csa_list_columns(shape) * sizeof *a.selected);
    a.records = carve(&next, (size_t)csa_record_count(shape) * CSA_RECORD_BYTES);
    a.peaks = carve(&next, peak_bytes(shape, (int64_t)tokens));
    a.scores = (float *)next;
    return a;
}

/* Regions up to the one of the largest position; padding counts as position 0. */
static int64_t bound(const csa_plan_args *args, int64_t first, int64_t end)
{
    int64_t largest = 0;
    if (!args->positions)
        return args->regions;
    for (int64_t token = first; token < end; token++)
        largest = args->positions[token] > largest ? args->positions[token] : largest;
    return largest / CSA_REGION < args->regions ? largest / CSA_REGION + 1 : args->regions;
}

void csa_fill_plan(csa_plan *plan, const csa_plan_args *args, const csa_step_shape *shape)
{
    plan->shape = *shape;
    plan->requests = args->requests;
    plan->invariant = args->invariant;
    plan->chunk_tokens = csa_chunk_tokens(shape);
    plan->chunks = (shape->tokens + plan->chunk_tokens - 1) / plan->chunk_tokens;
    for (int64_t chunk = 0; chunk < plan->chunks; chunk++) {
        int64_t first = chunk * plan->chunk_tokens, end = first + plan->chunk_tokens;
        plan->chunk_regions[chunk] = bound(args, first, end < shape->tokens ? end : shape->tokens);
    }
}
