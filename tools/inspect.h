/*
 * csa inspect: what rows selected and why.
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef CSA_TOOL_INSPECT_H
#define CSA_TOOL_INSPECT_H

#include "heatmap.h"
#include "quality.h"
#include "replay_parts.h"
#include "run_serve.h"

#include <stdio.h>

typedef struct inspect_options {
    const char *path, *glob, *svg;
    csa_backend backend;
    int64_t row, topk, best; /* -1, 0: not said */
    bool json;
} inspect_options;

/* ---- What a case knows of its rows (inspect_load.c) --------------------------------------------- */

/* Everything lives as long as the view. */
typedef struct inspect_view {
    const char *name, *op;
    replay_case c;        /* owns memory, and has the first fault */
    int64_t rows, groups; /* row r is group r % groups of token r / groups */
    int64_t regions;      /* most that a row may see */
    int64_t topk;         /* 0: not known */
    bool positions;       /* are the places' positions real? `select` only knows regions */
    const judge_row *places;
    const char *scores_from, *selected_from; /* "recorded", or what computed them; NULL: there are none */
    const float *scores;                     /* [rows, regions] */
    const int64_t *selected;                 /* [rows, columns] */
    int64_t columns;

    /* Where queries and KV are there. */
    int64_t heads; /* of a row; 0: they are not */
    replay_scoring scoring;
    replay_attention attention;
    run_context context; /* of the op `context`, like the next two */
    serve server;
    exact_attention exact;
    int64_t exact_query; /* whose attention `exact` holds; -1: nobody's */
} inspect_view;

/* Can cases of this op be inspected? */
bool inspect_knows(const char *op);

/* Returns an exit code; a failure has been said. inspect_close is to be called in any case. */
int inspect_load(inspect_view *v, replay *run, const inspect_options *options, const capture *file,
                 const capture_case *what);
void inspect_close(inspect_view *v);

/* Regions that a row sees, its own included; 0 for an inactive row. */
int64_t inspect_seen(const inspect_view *v, int64_t row);

/* ---- Softmax mass (inspect_mass.c) -------------------------------------------------------------- */

/* mass[head, r] is the share of a head's dense softmax that region r < inspect_seen holds. False without
 * memory. The view has heads. */
bool inspect_mass(inspect_view *v, int64_t row, double *mass);

/* ---- One row (inspect_row.c) -------------------------------------------------------------------- */

typedef struct inspect_row {
    int64_t row, seen;
    int64_t ranked;           /* historical regions: the current one is always selected */
    int64_t nan, plus, minus; /* of their scores: NaN and the infinities */
    int64_t *order;           /* [ranked]: best first; NULL without scores */
    bool *chosen;             /* [seen]: selected, the current one included */
    int64_t count;            /* selected historical regions */
    int64_t idle;             /* entries of the list that name no region the row sees; padding is not counted */
    int64_t worst, next;      /* the worst selected region and the best one that is not; -1: none */
    int64_t ties, ties_chosen; /* ranked regions with the worst selected one's score, itself included */
    int64_t differ;            /* regions in which the list differs from an exact selection; -1: not known */
    double *mass;              /* [seen]: the mean of the heads; NULL: not known */
    double kept, lowest, own;  /* mass of the selected regions: mean, lowest head; mean of the current region */
} inspect_row;

/* False without memory; inspect_row_close is to be called all the same. */
bool inspect_row_open(inspect_row *r, inspect_view *v, int64_t row);
void inspect_row_close(inspect_row *r);

/* ---- Output (inspect_report.c) ------------------------------------------------------------------ */

void inspect_print(FILE *out, const inspect_view *v, const inspect_row *r, int64_t best);
struct json_t *inspect_json(const inspect_view *v, const inspect_row *r, int64_t best);

#endif
