/*
 * Which regions were selected, over rows or steps, as an SVG picture without scripts: rows downwards, regions
 * to the right, and below it, where it is known, where dense attention's softmax mass lies.
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef CSA_TOOL_HEATMAP_H
#define CSA_TOOL_HEATMAP_H

#include "tool.h"

enum { HEATMAP_MARKS = 256, HEATMAP_TEXT = 160 };

/* A ring drawn round a place. */
typedef struct heatmap_mark {
    int64_t row, region;
} heatmap_mark;

/* Neighbouring rows and regions are put together where there are more than a picture can show. The texts are
 * the caller's. */
typedef struct heatmap {
    char title[HEATMAP_TEXT], subtitle[HEATMAP_TEXT];
    const char *row_name;      /* what the rows are, for the axis */
    const char *selected_name; /* what the first panel shows */
    const char *mark_name;     /* what the marks are; NULL: there are none */
    bool has_mass;
    int64_t rows, regions;
    int64_t rows_used;           /* one past the last row that was added */
    int64_t row_bin, region_bin; /* how many are put together */
    int64_t bins;                /* of regions */
    double *selected, *visible;  /* sums over the rows and regions of a bin: [row bins, bins] */
    double *mass, *mass_rows;    /* the latter: [row bins], rows that were added */
    int64_t *labels;             /* [rows] */
    heatmap_mark marks[HEATMAP_MARKS];
    int64_t mark_count;
} heatmap;

/* False without memory; heatmap_close is to be called all the same. */
bool heatmap_open(heatmap *h, int64_t rows, int64_t regions);
void heatmap_close(heatmap *h);

/* Row `row` sees regions [0, current] and has selected these; negative entries and those past current are
 * padding. Several selections may be added to a row: the colour is their mean. */
void heatmap_add(heatmap *h, int64_t row, int64_t label, int64_t current, const int64_t *list, int64_t length);

/* The shares of softmax mass of [0, current], which sum to 1. */
void heatmap_add_mass(heatmap *h, int64_t row, int64_t current, const double *mass);

/* Marks beyond the first HEATMAP_MARKS are left out. */
void heatmap_add_mark(heatmap *h, int64_t row, int64_t region);

/* Returns an exit code; a failure has been said. */
int heatmap_write(const heatmap *h, const char *subcommand, const char *path);

#endif
