/*
 * How attention's work on cuda is cut: pure functions of sizes, for host and device (attend.cu says what is done with
 * what they give). A row's live list entries are units of 8, its units pieces of 8. Rows are cut into parts of whole
 * pieces, a block each; or, with few rows, into pieces, a cluster of blocks each.
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef CSA_CUDA_PARTS_H
#define CSA_CUDA_PARTS_H

#include "../plan.h"
#include "../tensor.h"

enum {
    CSA_UNIT = 8,                    /* list entries */
    CSA_UNITS = CSA_PIECE / CSA_UNIT, /* of a piece */
    CSA_MOST_BLOCKS = 8              /* of a cluster */
};

/* How the rows of a launch are cut. */
typedef struct csa_cut {
    int32_t blocks;     /* of a cluster; 1: blocks are alone */
    int32_t parts;      /* of the longest row; 1: rows are whole */
    int32_t part_units; /* of each */
    int32_t pieces;     /* of the longest row: records it may leave */
} csa_cut;

/* Not cut at all. */
CSA_INLINE csa_cut csa_whole_rows(void)
{
    csa_cut whole = {1, 1, INT32_MAX, 0};
    return whole;
}

/* Units of so many entries that parts are made of. Alone in the last piece, behind others, a unit is not counted: the
 * current region, where topk is a multiple of 64. The part before takes it, too. */
CSA_INLINE uint32_t csa_main_units(uint32_t entries)
{
    return (entries + CSA_UNIT - 1) / CSA_UNIT - (entries > 1 && entries % CSA_PIECE == 1 ? 1 : 0);
}

/* Blocks that share a piece so that `pieces` are done soonest on a device of so many multiprocessors. A cluster's time
 * is counted in units of work: its share of a piece, one to begin and, if blocks have to meet, one for that. Clusters
 * do not cross a device's partitions, so that larger ones leave some of it idle: a Hopper of 132 multiprocessors says
 * that so many run at a time. */
CSA_INLINE int32_t csa_blocks_of_piece(int64_t pieces, int32_t multiprocessors)
{
    const int64_t at_once[] = {264, 132, 62, 30};
    int32_t best = 1;
    int64_t best_time = INT64_MAX;
    for (int32_t blocks = 1, i = 0; blocks <= CSA_MOST_BLOCKS; blocks *= 2, i++) {
        int64_t here = at_once[i] * multiprocessors / 132;
        if (here == 0)
            break;
        int64_t time = (pieces + here - 1) / here * (CSA_UNITS / blocks + 1 + (blocks > 1 ? 1 : 0));
        if (time < best_time) {
            best_time = time;
            best = blocks;
        }
    }
    return best;
}

/* Cuts rows of up to `columns` entries so that all multiprocessors have blocks, at most the two that fit at a time, as
 * far as there is room for records. clusters: has the device any? */
CSA_INLINE csa_cut csa_cut_rows(int64_t rows, int64_t columns, int32_t multiprocessors, bool clusters,
                                int64_t most_records)
{
    int64_t pieces = (columns + CSA_PIECE - 1) / CSA_PIECE, of_part = 1;
    int64_t main = (csa_main_units((uint32_t)columns) + CSA_UNITS - 1) / CSA_UNITS;
    csa_cut cut = csa_whole_rows();
    if (rows * pieces > most_records || rows * CSA_MOST_BLOCKS > most_records)
        return cut;
    while (of_part < main && rows * ((main + of_part - 1) / of_part) > 2 * (int64_t)multiprocessors)
        of_part++;
    cut.pieces = (int32_t)pieces;
    if (of_part == 1 && clusters)
        cut.blocks = csa_blocks_of_piece(rows * main, multiprocessors);
    if (cut.blocks > 1) { /* a last unit has a cluster of its own */
        cut.parts = (int32_t)pieces;
        cut.part_units = CSA_UNITS;
    } else if (of_part < main) {
        cut.parts = (int32_t)((main + of_part - 1) / of_part);
        cut.part_units = (int32_t)of_part * CSA_UNITS;
    }
    return cut;
}

/* What a block has of a row: units from `first`, and perhaps the row's last one. */
typedef struct csa_share {
    uint32_t part, parts;  /* of the row; as many as have units */
    uint32_t rank;         /* of the block within its cluster */
    uint32_t entries;      /* live ones of the row, which end its list */
    uint32_t pieces;       /* of the row */
    uint32_t first, units; /* the last one included */
    bool tail;             /* is the last one the row's, a piece of its own? */
} csa_share;

CSA_INLINE csa_share csa_find_share(const csa_cut *cut, uint32_t part, uint32_t rank, uint32_t entries)
{
    csa_share s = {part, 1, rank, entries, (entries + CSA_PIECE - 1) / CSA_PIECE, 0, 0, false};
    uint32_t all = cut->blocks > 1 ? (entries + CSA_UNIT - 1) / CSA_UNIT : csa_main_units(entries);
    uint32_t part_units = (uint32_t)cut->part_units, most = part_units;
    if (cut->parts > 1 && all > 0)
        s.parts = (all + part_units - 1) / part_units;
    s.first = part * part_units;
    if (cut->blocks > 1) {
        most = CSA_UNITS / (uint32_t)cut->blocks;
        s.first += rank * most;
    }
    if (part < s.parts && s.first < all)
        s.units = all - s.first < most ? all - s.first : most;
    s.tail = all * CSA_UNIT < entries && part + 1 == s.parts;
    s.units += s.tail ? 1 : 0;
    return s;
}

/* Where in the row the block's unit of that number is. */
CSA_INLINE uint32_t csa_unit_of(const csa_share *s, uint32_t number)
{
    return s->tail && number + 1 == s->units ? (s->pieces - 1) * CSA_UNITS : s->first + number;
}

/* How many of the block's units from that number on are of one piece. */
CSA_INLINE uint32_t csa_units_together(const csa_share *s, uint32_t number)
{
    uint32_t end = s->units - (s->tail ? 1 : 0);
    if (number == end) /* the row's last one */
        return 1;
    return end - number < CSA_UNITS ? end - number : CSA_UNITS;
}

#endif
