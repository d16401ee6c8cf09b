/*
 * How attention's work on cuda is cut (src/cuda/parts.h): every unit of a row is somebody's, once, and what the parts
 * join to is the same sum, term by term, however the row is cut. What attend.cu does with its shares is played here with
 * hashes of expressions instead of values; the kernels themselves are tested on a device (test_cuda.c).
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "support.h"

#include "cuda/parts.h"

/* An expression: 0 is nothing, which joins without a trace. */
typedef uint64_t term;

static term unit_term(uint32_t unit)
{
    return (unit + 1) * UINT64_C(0x9E3779B97F4A7C15);
}

static term joined(term a, term b)
{
    if (a == 0 || b == 0)
        return a + b;
    term x = (a ^ (a >> 29)) * UINT64_C(0xBF58476D1CE4E5B9) + b;
    return (x ^ (x >> 32)) * UINT64_C(0x94D049BB133111EB) + 1;
}

/* A tree over neighbours, the missing ones at the end being nothing. */
static term tree(const term *leaves, uint32_t count)
{
    return count == 1 ? leaves[0] : joined(tree(leaves, count / 2), tree(leaves + count / 2, count / 2));
}

enum { MOST_PIECES = CSA_MAX_TOPK / CSA_PIECE + 1 };

/* What a row of so many entries comes to by definition. */
static term defined(uint32_t entries)
{
    term sum = 0;
    uint32_t units = (entries + CSA_UNIT - 1) / CSA_UNIT;
    for (uint32_t piece = 0; piece * CSA_UNITS < units; piece++) {
        term leaves[CSA_UNITS] = {0};
        for (uint32_t i = 0; i < CSA_UNITS && piece * CSA_UNITS + i < units; i++)
            leaves[i] = unit_term(piece * CSA_UNITS + i);
        sum = joined(sum, tree(leaves, CSA_UNITS));
    }
    return sum;
}

/* What a block makes of its units: for each piece that it touches, an entry of `records`; says which units it had. */
static void play_block(const csa_share *s, uint32_t span, term *records, uint8_t *had)
{
    for (uint32_t done = 0; done < s->units;) {
        term leaves[CSA_UNITS] = {0};
        uint32_t together = csa_units_together(s, done), first = csa_unit_of(s, done);
        CHECK(together >= 1 && together <= CSA_UNITS && done + together <= s->units);
        CHECKF(first % span == 0, "a tree of %u units starts at unit %u", span, first);
        for (uint32_t i = 0; i < together; i++) {
            uint32_t unit = csa_unit_of(s, done + i);
            CHECK(unit == first + i && unit / CSA_UNITS == first / CSA_UNITS);
            had[unit]++;
            leaves[i] = unit_term(unit);
        }
        records[first / CSA_UNITS] = tree(leaves, CSA_UNITS);
        done += together;
    }
}

/* The row as the blocks of a cut make it. */
static term played(const csa_cut *cut, uint32_t entries)
{
    term pieces[MOST_PIECES] = {0}, sum = 0;
    uint8_t had[MOST_PIECES * CSA_UNITS] = {0};
    uint32_t parts = 0, span = CSA_UNITS / (uint32_t)cut->blocks;
    for (uint32_t part = 0; part < (uint32_t)cut->parts; part++) {
        term of_blocks[CSA_MOST_BLOCKS][MOST_PIECES] = {{0}};
        csa_share s = {0};
        for (uint32_t rank = 0; rank < (uint32_t)cut->blocks; rank++) {
            s = csa_find_share(cut, part, rank, entries);
            CHECK(s.parts >= 1 && s.parts <= (uint32_t)cut->parts);
            CHECK(part < s.parts || s.units == 0);
            play_block(&s, span, of_blocks[rank], had);
        }
        parts += part < s.parts;
        if (part + 1 == (uint32_t)cut->parts)
            CHECKF(parts == s.parts, "%u parts come, %u are waited for", parts, s.parts);
        CHECK(cut->blocks == 1 || part >= s.parts || s.pieces <= 1 || s.pieces == s.parts);
        for (uint32_t piece = 0; piece < MOST_PIECES; piece++) {
            term leaves[CSA_MOST_BLOCKS];
            for (int32_t rank = 0; rank < cut->blocks; rank++)
                leaves[rank] = of_blocks[rank][piece];
            term whole = tree(leaves, (uint32_t)cut->blocks);
            CHECKF(whole == 0 || pieces[piece] == 0, "two parts have piece %u", piece);
            CHECKF(whole == 0 || cut->parts == 1 || piece < (uint32_t)cut->pieces, "no room for piece %u", piece);
            pieces[piece] += whole;
        }
    }
    for (uint32_t unit = 0; unit < MOST_PIECES * CSA_UNITS; unit++)
        CHECKF(had[unit] == (unit * CSA_UNIT < entries), "unit %u is done %d times", unit, had[unit]);
    for (uint32_t piece = 0; piece < MOST_PIECES; piece++)
        sum = joined(sum, pieces[piece]);
    return sum;
}

static void rows_add_up_however_cut(void **state)
{
    (void)state;
    int kinds[3] = {0}; /* whole rows, parts, clusters */
    for (int draw = 0; draw < 4000; draw++) {
        test_set_draw(draw);
        test_random r = random_of((uint64_t)draw, 90);
        int64_t columns = random_chance(&r, 50) ? RANDOM_OF(&r, 1, 2, 9, 64, 65, 129, 257, 512, 513, 1025)
                                                : random_between(&r, 1, CSA_MAX_TOPK + 1);
        int64_t rows = random_chance(&r, 50) ? random_between(&r, 1, 20) : random_between(&r, 1, 400);
        int32_t multiprocessors = RANDOM_OF(&r, 1, 16, 80, 132, 148);
        int64_t most = random_chance(&r, 20) ? random_between(&r, 0, 200) : CSA_MOST_RECORDS;
        csa_cut cut = csa_cut_rows(rows, columns, multiprocessors, random_chance(&r, 70), most);
        CHECK(cut.blocks >= 1 && cut.blocks <= CSA_MOST_BLOCKS && cut.parts >= 1);
        CHECK((cut.parts == 1 && cut.blocks == 1) || rows * cut.pieces <= most);
        CHECK(cut.blocks == 1 || rows * CSA_MOST_BLOCKS <= most);
        for (uint32_t entries = 0; entries <= (uint32_t)columns; entries += (uint32_t)random_between(&r, 1, 9))
            CHECKF(played(&cut, entries) == defined(entries),
                   "%u of %d entries, %d rows: %d parts of %d units, %d blocks a piece", entries, (int)columns,
                   (int)rows, cut.parts, cut.part_units, cut.blocks);
        CHECK(played(&cut, (uint32_t)columns) == defined((uint32_t)columns));
        kinds[cut.blocks > 1 ? 2 : cut.parts > 1]++;
    }
    CHECKF(kinds[0] > 100 && kinds[1] > 100 && kinds[2] > 100, "%d whole, %d in parts, %d in clusters", kinds[0],
           kinds[1], kinds[2]);
}

static void whole_rows_are_one_share(void **state)
{
    (void)state;
    csa_cut whole = csa_whole_rows();
    for (uint32_t entries = 0; entries <= CSA_MAX_TOPK + 1; entries++)
        CHECK(played(&whole, entries) == defined(entries));
}

static void an_h200_is_filled(void **state)
{
    (void)state;
    static const struct {
        int64_t rows;
        int32_t blocks, parts, part_units;
    } expected[] = {
        {1, 8, 9, 8}, {8, 2, 9, 8}, {32, 1, 8, 8}, {33, 1, 8, 8}, {64, 1, 4, 16}, {128, 1, 2, 32}, {256, 1, 1, INT32_MAX},
    };
    for (size_t i = 0; i < sizeof expected / sizeof *expected; i++) {
        csa_cut cut = csa_cut_rows(expected[i].rows, 513, 132, true, CSA_MOST_RECORDS);
        CHECKF(cut.blocks == expected[i].blocks && cut.parts == expected[i].parts &&
                   cut.part_units == expected[i].part_units,
               "%d rows: %d blocks, %d parts of %d units", (int)expected[i].rows, cut.blocks, cut.parts,
               cut.part_units);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rows_add_up_however_cut),
        cmocka_unit_test(whole_rows_are_one_share),
        cmocka_unit_test(an_h200_is_filled),
    };
    test_seed();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
