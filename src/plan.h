/*
 * Planning on the host: how a step is cut into chunks of tokens, and what scratch that takes. Pure functions of
 * sizes; no device, no context.
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef CSA_PLAN_H
#define CSA_PLAN_H

#include "context.h"

#if defined(__cplusplus)
extern "C" {
#endif

/* What decides the scratch of a step. */
typedef struct csa_step_shape {
    int64_t tokens;
    int64_t groups;
    int64_t regions;
    int64_t topk;
    size_t limit; /* scratch_limit */
    bool cuda;    /* rows of small steps are attended to in parts */
} csa_step_shape;

/* Columns of a selection: min(topk, regions) + 1. */
int64_t csa_list_columns(const csa_step_shape *shape);

/* Are scores read at all? Not if everything is selected. */
bool csa_step_ranks(const csa_step_shape *shape);

/* Floats from one row of scores to the next. */
int64_t csa_score_stride(const csa_step_shape *shape);

/* Tokens handled at a time; at least 1. */
int64_t csa_chunk_tokens(const csa_step_shape *shape);

/* On cuda, groups of neighbouring scores of long rows have a peak, their largest. */
enum {
    CSA_PEAK_SHIFT = 3,
    CSA_PEAK = 1 << CSA_PEAK_SHIFT, /* regions */
    CSA_SHORT_ROW = 8192,           /* regions at most: selected from without peaks */
    CSA_LONG_ROW = 16384,           /* likewise, where rows are many: more than CSA_PEAK_ROWS */
    CSA_PEAK_ROWS = 256
};

/* On cuda, rows that attention works on at a time; chunks that have more have a multiple of it, less what is
 * not a whole token's. */
enum { CSA_WAVE_ROWS = 512 };

/* Floats from one row of peaks to the next; 0: none. */
int64_t csa_peak_stride(const csa_step_shape *shape);

/* Of so many rows of a chunk, how many there is room for peaks of. */
int64_t csa_peak_rows(const csa_step_shape *shape, int64_t rows);

/*
 * Parts of rows on cuda. A row's list is cut into pieces, these into quads, these into units. Where rows are so
 * few that they would not keep a GPU busy, each part leaves a record of its maxima, sums and values, which are
 * joined afterwards.
 */
enum {
    CSA_UNIT = 8,        /* list entries */
    CSA_QUAD = 32,       /* likewise */
    CSA_PIECE = 64,      /* likewise */
    CSA_CUT_ROWS = 384,  /* more rows are not cut */
    CSA_CUT_UNITS = 640, /* nor into more units or quads */
    CSA_RECORD_BYTES = 4 * CSA_MAX_HEADS * (CSA_HEAD_SIZE + 2)
};

/* List entries of a part, CSA_UNIT, CSA_QUAD or CSA_PIECE, and parts of each row; both 0: rows are not cut. */
typedef struct csa_cut {
    int64_t entries, parts;
} csa_cut;

/* At most so many units, quads, rows that are cut, and records, for which there is room. */
typedef struct csa_cut_limits {
    int64_t units, quads, rows, records;
} csa_cut_limits;

/* How rows with lists of so many columns are cut: into the shortest parts that are few enough, and not into
 * one. */
csa_cut csa_cut_rows(int64_t rows, int64_t columns, const csa_cut_limits *most);

/* Records that find room in the workspace, in what a chunk leaves of the limit; none but on cuda. */
int64_t csa_record_count(const csa_step_shape *shape);

/* Bytes of workspace for the whole step: grows with tokens and regions, at most max(limit, one token's
 * scratch). */
size_t csa_step_bytes(const csa_step_shape *shape);

/* Where a chunk's arrays lie in a workspace of csa_step_bytes. */
typedef struct csa_chunk_arrays {
    int64_t *positions; /* [tokens], -1 where inactive */
    int64_t *owners;    /* [tokens] */
    int64_t *current;   /* [rows] */
    int64_t *selected;  /* [rows, columns] */
    void *records;      /* [csa_record_count, CSA_RECORD_BYTES] */
    float *peaks;       /* [csa_peak_rows(shape, rows), csa_peak_stride(shape)] */
    float *scores;      /* [rows, csa_score_stride(shape)] */
} csa_chunk_arrays;
csa_chunk_arrays csa_lay_out_chunk(const csa_step_shape *shape, void *workspace);

struct csa_plan {
    const csa_context *context; /* who made it: compared, never followed */
    csa_step_shape shape;
    int64_t requests;
    bool invariant;
    int64_t chunk_tokens;
    int64_t chunks;
    int64_t *chunk_regions; /* most regions that a row of each chunk may see */
    int64_t capacity;       /* chunks that chunk_regions holds */
};

/* Fills a plan's fields from checked arguments; chunk_regions has room for them. */
void csa_fill_plan(csa_plan *plan, const csa_plan_args *args, const csa_step_shape *shape);

#if defined(__cplusplus)
}
#endif

#endif
