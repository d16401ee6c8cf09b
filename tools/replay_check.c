/*
 * csa replay: comparing outputs with recordings and with the tool's own judgement.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "replay.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- Reports ------------------------------------------------------------------------------------ */

static char *copy_text(const char *text)
{
    char *copy = strdup(text);
    if (copy == NULL)
        exit(tool_fail(TOOL_INTERNAL, "replay", "out of memory"));
    return copy;
}

/* Room for one more element. */
static void *grow(void *array, size_t count, size_t *capacity, size_t size)
{
    if (count < *capacity)
        return array;
    *capacity = *capacity * 2 + 16;
    array = realloc(array, *capacity * size);
    if (array == NULL)
        exit(tool_fail(TOOL_INTERNAL, "replay", "out of memory"));
    return array;
}

void replay_report(replay_case *c, const char *output, replay_result result)
{
    replay *run = c->run;
    run->results = grow(run->results, run->count, &run->capacity, sizeof *run->results);
    result.file = copy_text(c->path);
    result.name = copy_text(c->what->name);
    result.op = copy_text(c->what->op);
    result.output = copy_text(output);
    run->results[run->count++] = result;
}

static void report_as(replay_case *c, const char *output, replay_verdict verdict, replay_result result)
{
    result.verdict = verdict;
    result.seconds = c->seconds;
    if (!c->keep_only)
        replay_report(c, output, result);
}

static void report(replay_case *c, const char *output, bool pass, replay_result result)
{
    report_as(c, output, pass ? REPLAY_PASS : REPLAY_FAIL, result);
}

/* ---- Element by element ------------------------------------------------------------------------- */

/* Where element `index` of a tensor of shape `shape` lies in `whole`, which may be larger. */
static int64_t place_in(const csa_tensor *whole, const int64_t *shape, int64_t index)
{
    int64_t place = 0;
    for (int32_t i = whole->ndim - 1; i >= 0; i--) {
        place += index % shape[i] * whole->stride[i];
        index /= shape[i];
    }
    return place;
}

static bool specified(const csa_tensor *whole, const int64_t *limits, int64_t place)
{
    if (limits == NULL)
        return true;
    int64_t row = whole->stride[0];
    return place % row < limits[place / row];
}

typedef struct difference {
    int64_t entries, differ, farthest, first;
} difference;

static bool nan_and_lowest(const char *a, const char *b)
{
    return isnan(judge_value(CSA_E4M3, a, 0)) && judge_value(CSA_E4M3, b, 0) == -448;
}

/* Compares a, of which b may be a corner. */
static difference compare(csa_tensor a, csa_tensor b, replay_tolerance tolerance)
{
    difference found = {.first = -1};
    size_t size = reader_element(a.dtype);
    bool whole = memcmp(a.shape, b.shape, (size_t)a.ndim * sizeof *a.shape) == 0;
    int64_t elements = replay_elements(&b);
    for (int64_t i = 0; i < elements; i++) {
        int64_t place = whole ? i : place_in(&a, b.shape, i);
        if (!specified(&a, tolerance.limits, place))
            continue;
        const char *x = (const char *)a.data + (size_t)place * size,
                   *y = (const char *)b.data + (size_t)i * size;
        int64_t steps = judge_steps(a.dtype, x, y, 0);
        if (tolerance.nan_as_lowest && a.dtype == CSA_E4M3 && nan_and_lowest(x, y))
            steps = 0;
        found.entries++;
        found.differ += steps > 0;
        found.farthest = steps > found.farthest ? steps : found.farthest;
        if (steps > 0 && found.first < 0)
            found.first = i;
    }
    return found;
}

/* At most two entries in ten thousand, or two, `steps` codes apart. */
static bool tolerated(difference d, int64_t steps)
{
    int64_t few = d.entries / 5000 > 2 ? d.entries / 5000 : 2;
    return d.differ == 0 || (d.differ <= few && d.farthest <= steps);
}

static void describe(replay_result *result, difference d, int64_t steps)
{
    result->entries = d.entries;
    result->differ = d.differ;
    result->error = -1;
    result->limit = -1;
    if (d.differ == 0)
        return;
    if (steps > 0 && d.farthest < INT64_MAX) {
        result->error = (double)d.farthest;
        result->limit = (double)steps;
        snprintf(result->note, sizeof result->note, "codes apart, first at entry %lld", (long long)d.first);
    } else
        snprintf(result->note, sizeof result->note, "first at entry %lld", (long long)d.first);
}

/* ---- Recorded outputs --------------------------------------------------------------------------- */

static const reader_tensor *find_recorded(replay_case *c, const char *name)
{
    for (size_t i = 0; !c->keep_only && i < c->what->outputs; i++) {
        const capture_tensor *output = &c->what->tensors[c->what->inputs + i];
        if (strcmp(output->name, name) == 0) {
            c->checked[i] = true;
            return output->tensor;
        }
    }
    return NULL;
}

/* May `recorded` be compared with `got`: the same shape, or a corner of it? */
static bool comparable(replay_case *c, const char *name, const csa_tensor *got, const csa_tensor *recorded)
{
    bool corner = capture_corner(c->what, name);
    bool fits = got->dtype == recorded->dtype && got->ndim == recorded->ndim;
    for (int32_t i = 0; fits && i < got->ndim; i++)
        fits = corner ? recorded->shape[i] <= got->shape[i] : recorded->shape[i] == got->shape[i];
    return fits;
}

csa_tensor replay_take(replay_case *c, const char *name, csa_tensor like)
{
    const reader_tensor *recorded = replay_ok(c) ? find_recorded(c, name) : NULL;
    if (recorded == NULL)
        return (csa_tensor){0};
    return comparable(c, name, &like, &recorded->view)
               ? recorded->view
               : replay_record(c, name, like.dtype, like.ndim, like.shape);
}

void replay_skip(replay_case *c, const char *name, const char *reason)
{
    replay_result result = {.verdict = REPLAY_NOT_COMPARED, .seconds = -1};
    snprintf(result.note, sizeof result.note, "%s", reason);
    if (replay_ok(c) && find_recorded(c, name) != NULL)
        replay_report(c, name, result);
}

static void report_unjudged(replay_case *c, const char *name)
{
    replay_result result = {.error = -1, .limit = -1, .note = "inputs only"};
    if (c->what->outputs == 0)
        report_as(c, name, REPLAY_NOT_JUDGED, result);
}

static bool another_length(const csa_tensor *got, const csa_tensor *recorded)
{
    csa_tensor cut = *got;
    cut.shape[0] = recorded->shape[0];
    return got->dtype == recorded->dtype && got->ndim == recorded->ndim && got->ndim > 0 &&
           memcmp(cut.shape, recorded->shape, (size_t)got->ndim * sizeof *cut.shape) == 0;
}

void replay_check(replay_case *c, const char *name, csa_tensor got, replay_tolerance tolerance)
{
    if (!replay_ok(c))
        return;
    const reader_tensor *recorded = find_recorded(c, name);
    replay_result result = {.error = -1, .limit = -1};
    if (recorded == NULL) {
        report_unjudged(c, name);
    } else if (comparable(c, name, &got, &recorded->view)) {
        difference d = compare(got, recorded->view, tolerance);
        describe(&result, d, tolerance.steps);
        report(c, name, tolerated(d, tolerance.steps), result);
    } else if (tolerance.free_size && another_length(&got, &recorded->view)) {
        snprintf(result.note, sizeof result.note, "%lld entries, %lld recorded", (long long)got.shape[0],
                 (long long)recorded->view.shape[0]);
        report(c, name, false, result);
    } else
        replay_record(c, name, got.dtype, got.ndim, got.shape);
    replay_keep(c, name, got, tolerance.limits);
}

void replay_check_judged(replay_case *c, const char *name, csa_tensor got, csa_tensor expected)
{
    csa_tensor recorded = replay_take(c, name, got);
    if (!replay_ok(c))
        return;
    replay_result result = {0};
    difference own = compare(got, expected, REPLAY_EXACT), other = {0};
    if (recorded.ndim > 0)
        other = compare(got, recorded, REPLAY_EXACT);
    describe(&result, own.differ > 0 ? own : other, 0);
    if (own.differ > 0)
        snprintf(result.note, sizeof result.note, "not what SPEC.md says, first at entry %lld",
                 (long long)own.first);
    report(c, name, own.differ == 0 && other.differ == 0, result);
}

void replay_agree(replay_case *c, const char *what, csa_tensor a, csa_tensor b, const int64_t *limits)
{
    if (!replay_ok(c))
        return;
    replay_result result = {0};
    difference d = compare(a, b, (replay_tolerance){.limits = limits});
    describe(&result, d, 0);
    report_as(c, what, d.differ == 0 ? REPLAY_AGREE : REPLAY_FAIL, result);
}

/* ---- What --write keeps ---- */

static reader_tensor make_kept(const replay_case *c, const char *name, csa_tensor shape)
{
    size_t room = strlen(c->what->name) + strlen(name) + sizeof "/out.";
    char *full = malloc(room);
    size_t bytes = (size_t)replay_elements(&shape) * reader_element(shape.dtype);
    shape.data = calloc(bytes + 1, 1);
    if (full == NULL || shape.data == NULL)
        exit(tool_fail(TOOL_INTERNAL, "replay", "out of memory"));
    snprintf(full, room, "%s/out.%s", c->what->name, name);
    return (reader_tensor){full, shape, bytes};
}

static void put_kept(replay *run, reader_tensor kept)
{
    for (size_t i = run->kept_count; i-- > 0;)
        if (strcmp(run->kept[i].name, kept.name) == 0) {
            free((char *)run->kept[i].name);
            free(run->kept[i].view.data);
            run->kept[i] = kept;
            return;
        }
    run->kept = grow(run->kept, run->kept_count, &run->kept_capacity, sizeof *run->kept);
    run->kept[run->kept_count++] = kept;
}

void replay_keep(replay_case *c, const char *name, csa_tensor got, const int64_t *limits)
{
    replay *run = c->run;
    if (!run->write || !replay_ok(c))
        return;
    const reader_tensor *recorded = capture_output(c->what, name);
    csa_tensor shape = got;
    if (recorded != NULL && capture_corner(c->what, name))
        memcpy(shape.shape, recorded->view.shape, sizeof shape.shape);
    reader_tensor kept = make_kept(c, name, shape);
    size_t size = reader_element(got.dtype);
    for (int64_t i = 0; i < (int64_t)(kept.bytes / size); i++) {
        int64_t place = place_in(&got, shape.shape, i);
        if (specified(&got, limits, place))
            memcpy((char *)kept.view.data + (size_t)i * size, (const char *)got.data + (size_t)place * size,
                   size);
    }
    put_kept(run, kept);
}

/* ---- Scores ------------------------------------------------------------------------------------- */

typedef struct score_errors {
    double largest; /* in bounds */
    int64_t entries, differ, wrong, wrong_recorded;
} score_errors;

static void judge_one_score(score_errors *e, float got, const float *recorded, float score, double bound)
{
    e->entries++;
    e->wrong += !judge_score_within(got, score, bound);
    if (isfinite(got) && isfinite(score))
        e->largest = fmax(e->largest, fabs((double)got - (double)score) / bound);
    if (recorded != NULL) {
        e->wrong_recorded += !judge_score_within(*recorded, score, bound);
        e->differ += judge_steps(CSA_F32, &got, recorded, 0) > 0;
    }
}

static score_errors judge_scores(csa_tensor got, csa_tensor recorded, replay_scorer scorer)
{
    score_errors e = {0};
    const float *ours = got.data, *theirs = recorded.data;
    int64_t regions = got.shape[1];
    for (int64_t row = 0; row < got.shape[0]; row++)
        for (int64_t r = 0; r < scorer.limits[row] && r < regions; r++) {
            float score;
            double bound;
            bool known = row < recorded.shape[0] && r < recorded.shape[1] &&
                         (scorer.wrong == NULL || scorer.wrong[row] == 0);
            scorer.score(scorer.data, row, r, &score, &bound);
            judge_one_score(&e, ours[row * regions + r], known ? &theirs[row * recorded.shape[1] + r] : NULL,
                            score, bound);
        }
    return e;
}

static void check_scores(replay_case *c, const char *what, csa_tensor got, csa_tensor recorded,
                         replay_scorer scorer)
{
    if (!replay_ok(c))
        return;
    score_errors e = judge_scores(got, recorded, scorer);
    replay_result result = {.entries = e.entries, .differ = e.differ, .error = e.largest, .limit = 1};
    if (e.wrong > 0)
        snprintf(result.note, sizeof result.note, "%lld out of bounds", (long long)e.wrong);
    else if (e.wrong_recorded > 0)
        snprintf(result.note, sizeof result.note, "%lld recorded ones out of bounds",
                 (long long)e.wrong_recorded);
    else if (e.largest > 0)
        snprintf(result.note, sizeof result.note, "of section 4's bound");
    report(c, what, e.wrong == 0 && e.wrong_recorded == 0, result);
}

void replay_check_scores(replay_case *c, const char *name, csa_tensor got, replay_scorer scorer)
{
    check_scores(c, name, got, replay_take(c, name, got), scorer);
    replay_keep(c, name, got, scorer.limits);
}

void replay_judge_scores(replay_case *c, const char *what, csa_tensor got, replay_scorer scorer)
{
    check_scores(c, what, got, (csa_tensor){0}, scorer);
}

/* ---- Selections --------------------------------------------------------------------------------- */

void replay_check_selected(replay_case *c, const char *name, csa_tensor got, csa_tensor scores,
                           const int64_t *current, int64_t topk)
{
    csa_tensor sorted = replay_output(c, CSA_I64, 2, got.shape);
    int64_t regions = scores.shape[1];
    for (int64_t row = 0; replay_ok(c) && row < got.shape[0]; row++) {
        const float *line = scores.data != NULL ? (const float *)scores.data + row * regions : NULL;
        if (!judge_select(line, regions, current[row], topk, (int64_t *)sorted.data + row * got.shape[1]))
            replay_fault(c, TOOL_INTERNAL, name, "out of memory");
    }
    replay_check_judged(c, name, got, sorted);
    replay_keep(c, name, got, NULL);
}

/* ---- Attention ---------------------------------------------------------------------------------- */

static const double total_limit = 4e-3, head_limit = 8e-3, recorded_limit = 6e-3;

typedef struct attention_errors {
    judge_norms exact, recorded;
    int64_t entries, differ;
    int64_t inactive;          /* entries of inactive rows that are not 0 */
    int64_t recorded_inactive; /* the same of the recording, NaN not counted (section 8) */
} attention_errors;

/* Compares what a recording has of a head; what it lacks, having been cut, counts as 0 on both sides. */
static void compare_head(attention_errors *e, const uint16_t *got, const uint16_t *recorded, int64_t known)
{
    double values[CSA_HEAD_SIZE] = {0};
    uint16_t ours[CSA_HEAD_SIZE] = {0};
    for (int64_t i = 0; i < known; i++) {
        values[i] = judge_value(CSA_BF16, recorded, i);
        ours[i] = got[i];
        e->differ += judge_steps(CSA_BF16, got, recorded, i) > 0;
    }
    judge_norms_add(&e->recorded, values, ours);
}

/* With an e4m3 cache the reference makes infinity of a query that fp16 cannot hold (section 8). */
static bool reference_overflows(const judge_attend_args *args, int64_t place)
{
    bool large = false;
    for (int64_t i = 0; i < CSA_HEAD_SIZE; i++)
        large |= fabs(judge_value(CSA_BF16, args->query, place + i)) > 65504;
    return large && args->cache->kv.dtype == CSA_E4M3;
}

/* An inactive head is 0. */
static void judge_inactive(attention_errors *e, const uint16_t *got, const uint16_t *recorded, int64_t known)
{
    for (int64_t i = 0; i < CSA_HEAD_SIZE; i++)
        e->inactive += !(judge_value(CSA_BF16, got, i) == 0);
    for (int64_t i = 0; i < known; i++)
        e->recorded_inactive += fabs(judge_value(CSA_BF16, recorded, i)) > 0;
}

/* recorded has `known` entries of the head, NULL: none; the query's head is at `place`. */
static void judge_active(attention_errors *e, const uint16_t *got, const uint16_t *recorded, int64_t known,
                         const judge_attend_args *args, int64_t place, const double *exact)
{
    judge_norms_add(&e->exact, exact, got);
    if (recorded != NULL && !reference_overflows(args, place))
        compare_head(e, got, recorded, known);
}

static attention_errors judge_attention(csa_tensor got, csa_tensor recorded, const judge_attend_args *args,
                                        const judge_row *rows, int64_t groups)
{
    attention_errors e = {0};
    double exact[JUDGE_HEADS][CSA_HEAD_SIZE];
    for (int64_t row = 0; row < got.shape[0]; row++) {
        judge_attend(args, rows[row], row, row % groups, exact);
        for (int32_t h = 0; h < args->heads; h++) {
            int64_t place = (row * args->heads + h) * CSA_HEAD_SIZE;
            const uint16_t *ours = (const uint16_t *)got.data + place, *theirs = NULL;
            if (row < recorded.shape[0] && h < recorded.shape[1])
                theirs = (const uint16_t *)recorded.data + row * recorded.stride[0] + h * recorded.stride[1];
            e.entries += CSA_HEAD_SIZE;
            if (rows[row].active)
                judge_active(&e, ours, theirs, recorded.shape[2], args, place, exact[h]);
            else
                judge_inactive(&e, ours, theirs, theirs != NULL ? recorded.shape[2] : 0);
        }
    }
    return e;
}

/* The first thing that is wrong, NULL if nothing is. */
static const char *attention_fault(const attention_errors *e)
{
    if (e->inactive > 0)
        return "an inactive row is not 0";
    if (e->exact.misplaced > 0)
        return "NaN or infinity in other places than exact arithmetic has them";
    if (e->exact.nonzero > 0)
        return "not 0 where exact arithmetic gives 0";
    if (!(judge_norms_total(&e->exact) <= total_limit))
        return "against exact arithmetic";
    if (!(e->exact.worst <= head_limit))
        return "against exact arithmetic, the worst head";
    if (e->recorded_inactive > 0)
        return "the recording of an inactive row is not 0";
    if (e->recorded.misplaced > 0)
        return "NaN or infinity in other places than recorded";
    if (!(judge_norms_total(&e->recorded) <= recorded_limit))
        return "against the recording";
    return NULL;
}

static void check_attention(replay_case *c, const char *what, csa_tensor got, csa_tensor recorded,
                            const judge_attend_args *args, const judge_row *rows, int64_t groups)
{
    if (!replay_ok(c))
        return;
    attention_errors e = judge_attention(got, recorded, args, rows, groups);
    if (!replay_flag(c, "clear_inactive", true))
        e.recorded_inactive = 0;
    const char *fault = attention_fault(&e);
    double exact = judge_norms_total(&e.exact), other = judge_norms_total(&e.recorded);
    replay_result result = {.entries = e.entries, .differ = e.differ, .error = exact, .limit = total_limit};
    int used = snprintf(result.note, sizeof result.note, "%s%sworst head %.2g", fault != NULL ? fault : "",
                        fault != NULL ? "; " : "", e.exact.worst);
    if (recorded.ndim > 0)
        snprintf(result.note + used, sizeof result.note - (size_t)used, ", %.2g from recorded", other);
    report(c, what, fault == NULL, result);
}

void replay_check_attention(replay_case *c, const char *name, csa_tensor got, const judge_attend_args *args,
                            const judge_row *rows, int64_t groups)
{
    check_attention(c, name, got, replay_take(c, name, got), args, rows, groups);
    replay_keep(c, name, got, NULL);
}

void replay_judge_attention(replay_case *c, const char *what, csa_tensor got, const judge_attend_args *args,
                            const judge_row *rows, int64_t groups)
{
    check_attention(c, what, got, (csa_tensor){0}, args, rows, groups);
}
