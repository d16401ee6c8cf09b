/*
 * The replay tool judges: every recorded output of the captures, changed in one element by more than its
 * tolerance, fails; by no more, passes. And captures that lack something or lie about a size end with an exit
 * code, not with a crash. CSA_CAPTURES names the folder; without it the repository's is used.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "support.h"

#include <fcntl.h>
#include <glob.h>
#include <jansson.h>
#include <unistd.h>

#include "capture.h"
#include "judge.h"
#include "tool.h"

/* ---- One case in a file of its own -------------------------------------------------------------- */

static char folder[] = "/tmp/csa-tamper-XXXXXX";
static char path[64];

/* Writes a case with some of its tensors. */
static void write_case(const capture_case *what, const json_t *scalars, const reader_tensor *tensors,
                       size_t count)
{
    char text[READER_TEXT];
    char *dumped = json_dumps(scalars, JSON_COMPACT);
    json_t *metadata = json_pack("{s:s, s:s}", "format", "csa-capture/1", what->name, dumped);
    CHECKF(reader_write(path, tensors, count, metadata, text), "%s", text);
    json_decref(metadata);
    free(dumped);
}

/* Its exit code; what it prints is not looked at. */
static int replay(void)
{
    char name[] = "replay", *argv[] = {name, path, NULL};
    fflush(stdout);
    fflush(stderr);
    int keep_out = dup(STDOUT_FILENO), keep_err = dup(STDERR_FILENO), null = open("/dev/null", O_WRONLY);
    dup2(null, STDOUT_FILENO);
    dup2(null, STDERR_FILENO);
    int code = tool_replay(2, argv);
    fflush(stdout);
    fflush(stderr);
    dup2(keep_out, STDOUT_FILENO);
    dup2(keep_err, STDERR_FILENO);
    close(keep_out);
    close(keep_err);
    close(null);
    return code;
}

/* All tensors of a case, in memory to be freed. */
static reader_tensor *tensors_of(const capture_case *what)
{
    size_t count = what->inputs + what->outputs;
    reader_tensor *tensors = calloc(count + 1, sizeof *tensors);
    assert_non_null(tensors);
    for (size_t i = 0; i < count; i++)
        tensors[i] = *what->tensors[i].tensor;
    return tensors;
}

/* ---- What an output tolerates ------------------------------------------------------------------- */

typedef enum tolerance { EXACT, ONE_STEP, TWO_STEPS, SCORES, ATTENTION, NONE } tolerance;

static bool starts(const char *text, const char *with)
{
    return strncmp(text, with, strlen(with)) == 0;
}

static tolerance tolerance_of(const char *op, const char *name)
{
    if (strcmp(op, "context") == 0 || starts(name, "reference_"))
        return NONE;
    if (strcmp(name, "scores") == 0)
        return SCORES;
    if (starts(name, "out"))
        return strcmp(op, "gate") == 0 ? ONE_STEP : ATTENTION;
    if (starts(op, "summarize"))
        return strcmp(name, "mean") == 0 ? TWO_STEPS : EXACT;
    bool exact = strcmp(name, "weights") == 0 || strcmp(name, "main_v") == 0;
    return starts(op, "prepare") && !exact ? ONE_STEP : EXACT;
}

/* Moves the first number of a bf16 or e4m3 tensor by some codes; false if there is none. */
static bool step_code(csa_tensor *t, int steps, bool nonzero)
{
    int64_t count = tensor_count(t);
    int top = t->dtype == CSA_BF16 ? 0x7F7F : 0x7E, sign = t->dtype == CSA_BF16 ? 0x8000 : 0x80;
    for (int64_t i = 0; i < count; i++) {
        uint16_t *wide = (uint16_t *)t->data + i;
        uint8_t *narrow = (uint8_t *)t->data + i;
        int code = t->dtype == CSA_BF16 ? *wide : *narrow, size = code & ~sign;
        if (size > top || (nonzero && size == 0))
            continue;
        code += size + steps <= top ? steps : -steps;
        if (t->dtype == CSA_BF16)
            *wide = (uint16_t)code;
        else
            *narrow = (uint8_t)code;
        return true;
    }
    return false;
}

static bool change_beyond(csa_tensor *t, tolerance kind)
{
    if (kind == ONE_STEP || kind == TWO_STEPS)
        return step_code(t, kind == ONE_STEP ? 2 : 3, false);
    if (kind == ATTENTION)
        return step_code(t, 10 << 7, true); /* 2^10 times as large */
    if (kind == SCORES)
        *(float *)t->data = isfinite(*(float *)t->data) ? *(float *)t->data + 1000 : 0;
    else
        *(uint8_t *)t->data ^= 1;
    return true;
}

static bool change_within(csa_tensor *t, tolerance kind)
{
    float *score = t->data;
    if (kind == EXACT || kind == NONE)
        return false;
    if (kind != SCORES)
        return step_code(t, kind == TWO_STEPS ? 2 : 1, kind == ATTENTION);
    bool finite = isfinite(*score);
    *score = nextafterf(*score, INFINITY);
    return finite;
}

/* ---- Every output of every capture -------------------------------------------------------------- */

static int64_t tampered, harmless;

static void tamper_output(const capture_case *what, size_t index)
{
    reader_tensor *tensors = tensors_of(what);
    reader_tensor *victim = &tensors[index];
    tolerance kind = tolerance_of(what->op, what->tensors[index].name);
    void *copy = malloc(victim->bytes + 1), *original = victim->view.data;
    assert_non_null(copy);
    victim->view.data = copy;
    for (int beyond = 0; beyond < 2 && victim->bytes > 0; beyond++) {
        memcpy(copy, original, victim->bytes);
        if (!(beyond ? change_beyond : change_within)(&victim->view, kind))
            continue;
        write_case(what, what->scalars, tensors, what->inputs + what->outputs);
        int code = replay(), expected = beyond && kind != NONE ? TOOL_CHECK_FAILED : TOOL_OK;
        CHECKF(kind == NONE || code == expected, "%s, %s, %s: exit code %d, not %d", victim->name, what->op,
               beyond ? "beyond" : "within", code, expected);
        *(beyond ? &tampered : &harmless) += kind != NONE;
    }
    free(copy);
    free(tensors);
}

static void each_case(void (*visit)(const capture_case *what))
{
    const char *set = getenv("CSA_CAPTURES");
    char pattern[4096], text[READER_TEXT];
    glob_t files;
    snprintf(pattern, sizeof pattern, "%s/*.safetensors", set != NULL ? set : "captures/calls");
    assert_int_equal(glob(pattern, 0, NULL, &files), 0);
    for (size_t i = 0; i < files.gl_pathc; i++) {
        capture all;
        CHECKF(capture_open(files.gl_pathv[i], &all, text), "%s: %s", files.gl_pathv[i], text);
        for (size_t n = 0; n < all.count; n++)
            if (strcmp(all.cases[n].op, "context") != 0)
                visit(&all.cases[n]);
        capture_close(&all);
    }
    globfree(&files);
}

static void tamper_case(const capture_case *what)
{
    for (size_t i = 0; i < what->outputs; i++)
        tamper_output(what, what->inputs + i);
}

static void one_changed_element_is_found(void **state)
{
    (void)state;
    const char *set = getenv("CSA_CAPTURES");
    printf("captures: %s\n", set != NULL ? set : "those of the repository (CSA_CAPTURES names a full set)");
    each_case(tamper_case);
    printf("%lld outputs changed beyond their tolerance, %lld within\n", (long long)tampered,
           (long long)harmless);
    CHECK(tampered > 100 && harmless > 30);
}

/* ---- Captures that lack something --------------------------------------------------------------- */

static void expect_an_exit_code(const capture_case *what, const char *lacks)
{
    int code = replay();
    CHECKF(code == TOOL_OK || code == TOOL_CHECK_FAILED || code == TOOL_UNSUPPORTED || code == TOOL_BAD_FILE,
           "%s, %s, %s: exit code %d", what->name, what->op, lacks, code);
}

static void drop_tensors(const capture_case *what)
{
    for (size_t i = 0; i < what->inputs; i++) {
        reader_tensor *tensors = tensors_of(what);
        size_t last = what->inputs + what->outputs - 1;
        tensors[i] = tensors[last];
        write_case(what, what->scalars, tensors, last);
        expect_an_exit_code(what, what->tensors[i].name);
        free(tensors);
    }
}

/* A scalar gone, or of a size that cannot be. */
static void bend_scalars(const capture_case *what)
{
    static const json_int_t sizes[] = {-1, 0, 1, 1000000000000, INT64_MAX};
    reader_tensor *tensors = tensors_of(what);
    const char *key;
    json_t *value;
    json_object_foreach (what->scalars, key, value) {
        for (int i = -1; i < (int)(sizeof sizes / sizeof *sizes); i++) {
            json_t *scalars = json_deep_copy(what->scalars);
            if (i < 0)
                json_object_del(scalars, key);
            else if (json_is_number(value))
                json_object_set_new(scalars, key, json_integer(sizes[i]));
            else
                json_object_set_new(scalars, key, json_string("?"));
            if (strcmp(key, "op") != 0 || i >= 0) {
                write_case(what, scalars, tensors, what->inputs + what->outputs);
                expect_an_exit_code(what, key);
            }
            json_decref(scalars);
        }
    }
    free(tensors);
}

/* Every third entry of a list of numbers becomes `id`. */
static void bend_list(csa_tensor *t, const csa_tensor *from, int64_t id)
{
    int64_t count = tensor_count(t);
    memcpy(t->data, from->data, (size_t)(count * tensor_itemsize(t->dtype)));
    for (int64_t i = 1; i < count; i += 3)
        if (t->dtype == CSA_I64)
            ((int64_t *)t->data)[i] = id;
        else
            ((int32_t *)t->data)[i] = (int32_t)id;
}

/* Ids that lead anywhere. */
static void bend_ids(const capture_case *what)
{
    static const int64_t ids[] = {-1, INT32_MAX, INT64_MIN, INT64_MAX, 1 << 20};
    for (size_t i = 0; i < what->inputs; i++) {
        reader_tensor *tensors = tensors_of(what);
        csa_tensor *view = &tensors[i].view, original = *view;
        bool list = (view->dtype == CSA_I64 || view->dtype == CSA_I32) && tensors[i].bytes > 0;
        view->data = malloc(tensors[i].bytes + 1);
        assert_non_null(view->data);
        for (size_t n = 0; list && n < sizeof ids / sizeof *ids; n++) {
            bend_list(view, &original, ids[n]);
            write_case(what, what->scalars, tensors, what->inputs + what->outputs);
            expect_an_exit_code(what, what->tensors[i].name);
        }
        free(view->data);
        free(tensors);
    }
}

static void hostile_captures_end_with_a_code(void **state)
{
    (void)state;
    each_case(drop_tensors);
    each_case(bend_scalars);
    each_case(bend_ids);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(one_changed_element_is_found),
        cmocka_unit_test(hostile_captures_end_with_a_code),
    };
    if (mkdtemp(folder) == NULL)
        return 1;
    snprintf(path, sizeof path, "%s/case.safetensors", folder);
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    unlink(path);
    rmdir(folder);
    return failed;
}
