/*
 * csa inspect: what is printed of a row.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "inspect.h"

#include <inttypes.h>
#include <jansson.h>
#include <math.h>

/* ---- Text --------------------------------------------------------------------------------------- */

static double score_of(const inspect_view *v, const inspect_row *r, int64_t region)
{
    return (double)v->scores[r->row * v->regions + region];
}

/* Names come from files: what a terminal would obey is not passed on. */
static void print_name(FILE *out, const char *name)
{
    for (; *name != '\0'; name++)
        fputc(*name >= ' ' && *name <= '~' ? *name : '?', out);
}

static void print_heading(FILE *out, const inspect_view *v, const inspect_row *r)
{
    const judge_row *place = &v->places[r->row];
    print_name(out, v->name);
    fprintf(out, " (%s): %" PRId64 " rows", v->op, v->rows);
    if (v->groups > 1)
        fprintf(out, " (%" PRId64 " tokens x %" PRId64 " groups)", v->rows / v->groups, v->groups);
    fprintf(out, ", %" PRId64 " regions", v->regions);
    if (v->topk > 0)
        fprintf(out, ", topk %" PRId64, v->topk);
    fprintf(out, "\nscores: %s; selection: %s\n\n", v->scores_from ? v->scores_from : "none", v->selected_from);
    fprintf(out, "row %" PRId64, r->row);
    if (v->groups > 1)
        fprintf(out, " (token %" PRId64 ", group %" PRId64 ")", r->row / v->groups, r->row % v->groups);
    if (r->seen == 0) {
        fputs(": inactive, selects nothing\n", out);
        return;
    }
    if (v->positions)
        fprintf(out, ": position %" PRId64, place->position);
    fprintf(out, "%s in region %" PRId64 "; %" PRId64 " of %" PRId64 " earlier regions selected\n",
            v->positions ? "," : ":", r->seen - 1, r->count, r->ranked);
}

static void print_best(FILE *out, const inspect_view *v, const inspect_row *r, int64_t best)
{
    fputc('\n', out);
    if (!r->order || best == 0 || r->ranked == 0)
        return;
    fprintf(out, "%6s %8s %15s %14s %9s%s\n", "rank", "region", "tokens", "score", "selected",
            r->mass ? "       mass" : "");
    for (int64_t i = 0; i < r->ranked && i < best; i++) {
        int64_t region = r->order[i];
        char tokens[48];
        snprintf(tokens, sizeof tokens, "%" PRId64 "-%" PRId64, region * CSA_REGION,
                 region * CSA_REGION + CSA_REGION - 1);
        fprintf(out, "%6" PRId64 " %8" PRId64 " %15s %14.6g %9s", i + 1, region, tokens, score_of(v, r, region),
                r->chosen[region] ? "yes" : "no");
        if (r->mass)
            fprintf(out, " %10.4f", r->mass[region]);
        fputc('\n', out);
    }
    fputc('\n', out);
}

static void print_threshold(FILE *out, const inspect_view *v, const inspect_row *r)
{
    if (!r->order || r->ranked == 0)
        return;
    if (r->worst < 0)
        fputs("threshold  none: nothing was selected\n", out);
    else if (r->next < 0)
        fprintf(out, "threshold  none: every region is selected, the worst is %" PRId64 " with %.6g\n",
                r->worst, score_of(v, r, r->worst));
    else
        fprintf(out,
                "threshold  %.6g, region %" PRId64 "; the best that is not selected: %.6g, region %" PRId64
                "\n",
                score_of(v, r, r->worst), r->worst, score_of(v, r, r->next), r->next);
    if (r->ties > 1)
        fprintf(out,
                "ties       %" PRId64 " regions have the threshold's score, %" PRId64 " of them selected\n",
                r->ties, r->ties_chosen);
    if (r->nan + r->plus + r->minus > 0)
        fprintf(out, "scores     %" PRId64 " NaN, %" PRId64 " infinite, %" PRId64 " minus infinite\n", r->nan,
                r->plus, r->minus);
    if (r->differ > 0)
        fprintf(out, "NOTE       the selection is not the best by these scores: %" PRId64 " regions differ\n",
                r->differ);
}

/* Regions as ranges, in lines. */
static void print_selected(FILE *out, const inspect_row *r)
{
    int used = 0;
    fputs("selected   ", out);
    for (int64_t end, i = 0; i < r->seen; i = end) {
        char range[48];
        end = i + 1;
        if (!r->chosen[i])
            continue;
        while (end < r->seen && r->chosen[end])
            end++;
        int length = end - i > 1 ? snprintf(range, sizeof range, "%" PRId64 "-%" PRId64, i, end - 1)
                                 : snprintf(range, sizeof range, "%" PRId64, i);
        bool wraps = used + length > 96;
        if (used > 0)
            fputs(wraps ? ",\n           " : ", ", out);
        used = wraps ? length : used + length + 2;
        fputs(range, out);
    }
    fputs(used == 0 ? "nothing\n" : "\n", out);
    if (r->idle > 0)
        fprintf(out, "idle       %" PRId64 " entries of the list name no region, or one again\n", r->idle);
}

void inspect_print(FILE *out, const inspect_view *v, const inspect_row *r, int64_t best)
{
    print_heading(out, v, r);
    if (r->seen == 0)
        return;
    print_best(out, v, r, best);
    print_threshold(out, v, r);
    print_selected(out, r);
    if (r->mass)
        fprintf(out,
                "mass kept  %.4f, the mean of %" PRId64
                " heads; lowest head %.4f; the row's own region has %.4f\n",
                r->kept, v->heads, r->lowest, r->own);
}

/* ---- JSON --------------------------------------------------------------------------------------- */

/* JSON has no NaN and no infinity: null. */
static json_t *real(double value)
{
    return isfinite(value) ? json_real(value) : json_null();
}

static json_t *region_json(const inspect_view *v, const inspect_row *r, int64_t region)
{
    if (region < 0)
        return json_null();
    json_t *object = json_pack("{s:I, s:o, s:b}", "region", (json_int_t)region, "score",
                               real(score_of(v, r, region)), "selected", (int)r->chosen[region]);
    if (r->mass)
        json_object_set_new(object, "mass", real(r->mass[region]));
    return object;
}

static json_t *scores_json(const inspect_view *v, const inspect_row *r, int64_t best)
{
    if (!r->order)
        return json_null();
    json_t *list = json_array();
    for (int64_t i = 0; i < r->ranked && i < best; i++)
        json_array_append_new(list, region_json(v, r, r->order[i]));
    return json_pack("{s:o, s:o, s:o, s:I, s:I, s:I, s:I, s:I, s:I}", "best", list, "threshold",
                     region_json(v, r, r->worst), "next", region_json(v, r, r->next), "ties",
                     (json_int_t)r->ties, "ties_selected", (json_int_t)r->ties_chosen, "nan",
                     (json_int_t)r->nan, "infinite", (json_int_t)r->plus, "minus_infinite",
                     (json_int_t)r->minus, "differ", (json_int_t)r->differ);
}

static json_t *row_json(const inspect_view *v, const inspect_row *r, int64_t best)
{
    json_t *selected = json_array(), *mass = json_null();
    for (int64_t i = 0; i < r->seen; i++)
        if (r->chosen[i])
            json_array_append_new(selected, json_integer(i));
    if (r->mass)
        mass = json_pack("{s:o, s:o, s:o}", "kept", real(r->kept), "lowest_head", real(r->lowest), "current",
                         real(r->own));
    json_t *position = v->positions ? json_integer(v->places[r->row].position) : json_null();
    return json_pack("{s:I, s:I, s:I, s:b, s:o, s:I, s:I, s:o, s:I, s:o, s:o}", "number", (json_int_t)r->row,
                     "token", (json_int_t)(r->row / v->groups), "group", (json_int_t)(r->row % v->groups),
                     "active", r->seen > 0, "position", position, "current", (json_int_t)(r->seen - 1),
                     "ranked", (json_int_t)r->ranked, "selected", selected, "idle", (json_int_t)r->idle,
                     "scores", scores_json(v, r, best), "mass", mass);
}

/* A name that is not UTF-8 becomes null. */
json_t *inspect_json(const inspect_view *v, const inspect_row *r, int64_t best)
{
    json_t *name = json_string(v->name);
    return json_pack("{s:o, s:s, s:I, s:I, s:I, s:o, s:o, s:s, s:o}", "case", name ? name : json_null(), "op",
                     v->op, "rows", (json_int_t)v->rows, "groups", (json_int_t)v->groups, "regions",
                     (json_int_t)v->regions, "topk", v->topk > 0 ? json_integer(v->topk) : json_null(),
                     "scores_from", v->scores_from ? json_string(v->scores_from) : json_null(), "selected_from",
                     v->selected_from, "row", row_json(v, r, best));
}
