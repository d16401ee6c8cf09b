/*
 * The safetensors reader and writer: what is right is read, everything else is refused with its reason.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "support.h"

#include <jansson.h>
#include <sys/stat.h>
#include <unistd.h>

#include "reader.h"

/* ---- Files in memory ---------------------------------------------------------------------------- */

typedef struct file_bytes {
    uint8_t *bytes; /* exactly as long as it says, so that a sanitizer sees a step past the end */
    size_t size;
} file_bytes;

static file_bytes make_file(uint64_t length, const char *header, size_t header_size, size_t data)
{
    file_bytes f = {.size = 8 + header_size + data};
    f.bytes = malloc(f.size);
    assert_non_null(f.bytes);
    for (int i = 0; i < 8; i++)
        f.bytes[i] = (uint8_t)(length >> 8 * i);
    memcpy(f.bytes + 8, header, header_size);
    for (size_t i = 0; i < data; i++)
        f.bytes[8 + header_size + i] = (uint8_t)(i + 1);
    return f;
}

static file_bytes plain_file(const char *header, size_t data)
{
    return make_file(strlen(header), header, strlen(header), data);
}

static void expect_refused(file_bytes f, const char *why)
{
    char text[READER_TEXT] = "";
    reader file;
    CHECKF(!reader_parse(f.bytes, f.size, &file, text), "%s", why);
    CHECKF(strstr(text, why) != NULL, "'%s' does not say '%s'", text, why);
    reader_close(&file);
    free(f.bytes);
}

static const char good[] = "{\"__metadata__\":{\"format\":\"x\",\"b\":\"1\",\"a\":\"2\"},"
                           "\"m/in.long\":{\"dtype\":\"I64\",\"shape\":[2],\"data_offsets\":[1,17]},"
                           "\"byte\":{\"data_offsets\":[0,1],\"shape\":[1,1,1,1],\"dtype\":\"U8\"},"
                           "\"none\":{\"dtype\":\"BF16\",\"shape\":[3,0,7],\"data_offsets\":[17,17]},"
                           "\"scalar\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[17,21]},"
                           "\"bits\":{\"dtype\":\"BOOL\",\"shape\":[3],\"data_offsets\":[21,24]},"
                           "\"pair\":{\"dtype\":\"F8_E4M3\",\"shape\":[1,2],\"data_offsets\":[24,26]},"
                           "\"int\":{\"dtype\":\"I32\",\"shape\":[1],\"data_offsets\":[26,30]}}   ";

static void reads_what_is_right(void **state)
{
    (void)state;
    char text[READER_TEXT];
    reader file;
    file_bytes f = plain_file(good, 30);
    CHECKF(reader_parse(f.bytes, f.size, &file, text), "%s", text);
    assert_int_equal(file.count, 7);
    const reader_tensor *t = reader_find(&file, "m/in.long");
    assert_non_null(t);
    CHECK(t->view.dtype == CSA_I64 && t->view.ndim == 1 && t->view.shape[0] == 2 && t->bytes == 16);
    assert_int_equal((uintptr_t)t->view.data % 8, 0);
    assert_memory_equal(t->view.data, f.bytes + f.size - 29, 16);
    t = reader_find(&file, "none");
    CHECK(t->view.ndim == 3 && t->view.shape[0] == 3 && t->view.shape[1] == 0 && t->bytes == 0);
    CHECK(t->view.data == NULL);
    t = reader_find(&file, "scalar");
    CHECK(t->view.ndim == 0 && t->bytes == 4);
    t = reader_find(&file, "byte");
    CHECK(t->view.ndim == 4 && t->view.stride[0] == 1 && *(uint8_t *)t->view.data == 1);
    CHECK(reader_find(&file, "m/in.lon") == NULL && reader_find(&file, "") == NULL);
    assert_int_equal(json_object_size(reader_metadata(&file)), 3);
    reader_close(&file);
    reader_close(&file);
    free(f.bytes);
}

static void refuses_every_truncation(void **state)
{
    (void)state;
    file_bytes whole = plain_file(good, 30);
    for (size_t size = 0; size < whole.size; size++) {
        char text[READER_TEXT];
        reader file;
        uint8_t *part = malloc(size + (size == 0));
        assert_non_null(part);
        memcpy(part, whole.bytes, size);
        CHECKF(!reader_parse(part, size, &file, text), "%zu of %zu bytes", size, whole.size);
        free(part);
    }
    free(whole.bytes);
}

static void refuses_impossible_lengths(void **state)
{
    (void)state;
    static const uint64_t lengths[] = {0, 1, 9, READER_MAX_HEADER + 1, UINT32_MAX, UINT64_MAX / 2, UINT64_MAX};
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++)
        expect_refused(make_file(lengths[i], "{}      ", 8, 0), "cannot be right");
    expect_refused(make_file(2, "[]", 2, 0), "not a JSON object");
    expect_refused(make_file(2, "{}", 2, 1), "1 bytes after the last tensor");
}

/* ---- Headers that lie --------------------------------------------------------------------------- */

#define ENTRY(dtype, shape, offsets) \
    "{\"t\":{\"dtype\":" dtype ",\"shape\":" shape ",\"data_offsets\":" offsets "}}"

static void refuses_wrong_entries(void **state)
{
    (void)state;
    static const struct {
        const char *header, *why;
    } cases[] = {
        {"{\"t\":1}", "not an object of"},
        {"{\"t\":{\"dtype\":\"U8\",\"shape\":[4]}}", "not an object of"},
        {"{\"t\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4],\"x\":1}}", "not an object of"},
        {"{\"t\":{\"dtype\":\"U8\",\"shape\":[4],\"offsets\":[0,4]}}", "data_offsets"},
        {ENTRY("\"F64\"", "[4]", "[0,4]"), "dtype F64"},
        {ENTRY("\"f32\"", "[1]", "[0,4]"), "dtype f32"},
        {ENTRY("7", "[4]", "[0,4]"), "dtype"},
        {ENTRY("\"U8\"", "4", "[0,4]"), "shape"},
        {ENTRY("\"U8\"", "[1,1,1,2,2]", "[0,4]"), "at most 4"},
        {ENTRY("\"U8\"", "[-4]", "[0,4]"), "extent 0"},
        {ENTRY("\"U8\"", "[4.0]", "[0,4]"), "extent 0"},
        {ENTRY("\"U8\"", "[\"4\"]", "[0,4]"), "extent 0"},
        {ENTRY("\"U8\"", "[99999999999999999999]", "[0,4]"), "JSON"},
        {ENTRY("\"U8\"", "[4294967296,4294967296]", "[0,4]"), "too many"},
        {ENTRY("\"U8\"", "[0,4294967296,4294967296]", "[0,0]"), "too many"},
        {ENTRY("\"I64\"", "[2305843009213693952]", "[0,4]"), "too many"},
        {ENTRY("\"U8\"", "[3]", "[0,4]"), "need 3 bytes"},
        {ENTRY("\"BF16\"", "[4]", "[0,4]"), "need 8 bytes"},
        {ENTRY("\"U8\"", "[4]", "[0]"), "two whole numbers"},
        {ENTRY("\"U8\"", "[4]", "[0,2,4]"), "two whole numbers"},
        {ENTRY("\"U8\"", "[4]", "[0,4.0]"), "two whole numbers"},
        {ENTRY("\"U8\"", "[4]", "{\"0\":0,\"1\":4}"), "two whole numbers"},
        {ENTRY("\"U8\"", "[4]", "[4,0]"), "do not lie"},
        {ENTRY("\"U8\"", "[4]", "[-4,0]"), "do not lie"},
        {ENTRY("\"U8\"", "[4]", "[1,5]"), "do not lie"},
        {ENTRY("\"U8\"", "[4]", "[9223372036854775803,9223372036854775807]"), "do not lie"},
        {ENTRY("\"U8\"", "[3]", "[1,4]"), "after a gap"},
        {ENTRY("\"U8\"", "[3]", "[0,3]"), "1 bytes after the last"},
        {ENTRY("\"U8\"", "[0]", "[0,0]"), "4 bytes after the last"},
        {"{\"__metadata__\":[]}", "__metadata__ is not an object"},
        {"{\"__metadata__\":{\"a\":1}}", "not a string"},
        {"{\"t\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]},"
         "\"t\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}}",
         "duplicate"},
        {"{\"t\":{\"dtype\":\"U8\",\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}}", "duplicate"},
        {"{\"a\\u0000b\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}}", "JSON"},
        {"{\"\xFF\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}}", "JSON"},
        {"{} {}", "JSON"},
        {"{\"t\":", "JSON"},
        {"{\x01}", "JSON"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        test_set_draw((int64_t)i);
        expect_refused(plain_file(cases[i].header, 4), cases[i].why);
    }
}

#define TWO(a, b)                                                     \
    "{\"a\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":" a "}," \
    "\"b\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":" b "}}"

static void refuses_overlaps_and_gaps(void **state)
{
    (void)state;
    expect_refused(plain_file(TWO("[0,2]", "[1,3]"), 3), "inside the one");
    expect_refused(plain_file(TWO("[1,3]", "[0,2]"), 3), "inside the one");
    expect_refused(plain_file(TWO("[0,2]", "[0,2]"), 2), "inside the one");
    expect_refused(plain_file(TWO("[0,2]", "[3,5]"), 5), "after a gap");
    expect_refused(plain_file(TWO("[0,2]", "[2,4]"), 5), "1 bytes after the last");
}

static void refuses_deep_json(void **state)
{
    (void)state;
    enum { DEPTH = 100000 };
    char *header = malloc(2 * DEPTH + 16);
    assert_non_null(header);
    strcpy(header, "{\"t\":");
    size_t used = strlen(header);
    memset(header + used, '[', DEPTH);
    memset(header + used + DEPTH, ']', DEPTH);
    strcpy(header + used + 2 * (size_t)DEPTH, "}");
    expect_refused(plain_file(header, 0), "nested deeper than 16");
    free(header);
    /* Brackets in a string are no depth, whatever is escaped in it. */
    char text[READER_TEXT];
    static const char flat[] = "{\"a\": \"\\\"[[[[[[[[[[[[[[[[[[[[\\\\\"}";
    json_t *value = reader_json(flat, strlen(flat), text);
    assert_non_null(value);
    json_decref(value);
}

/* ---- On disk ------------------------------------------------------------------------------------ */

typedef struct folder {
    char path[64];
    char file[96];
} folder;

static folder make_folder(void)
{
    folder f = {.path = "/tmp/csa-reader-XXXXXX"};
    assert_non_null(mkdtemp(f.path));
    snprintf(f.file, sizeof f.file, "%s/file", f.path);
    return f;
}

static void expect_no_file(const char *path, const char *why)
{
    char text[READER_TEXT] = "";
    reader file;
    CHECKF(!reader_open(path, &file, text), "%s", path);
    CHECKF(strstr(text, why) != NULL, "'%s' does not say '%s'", text, why);
}

static void refuses_what_is_no_file(void **state)
{
    (void)state;
    folder f = make_folder();
    expect_no_file(f.path, "not a regular file");
    expect_no_file(f.file, "No such file");
    assert_int_equal(mkfifo(f.file, 0600), 0);
    expect_no_file(f.file, "not a regular file");
    unlink(f.file);
    fclose(fopen(f.file, "w"));
    expect_no_file(f.file, "too few");
    unlink(f.file);
    rmdir(f.path);
}

static void writes_what_it_reads(void **state)
{
    (void)state;
    char text[READER_TEXT];
    folder f = make_folder();
    reader before, after;
    file_bytes bytes = plain_file(good, 30);
    CHECKF(reader_parse(bytes.bytes, bytes.size, &before, text), "%s", text);
    CHECKF(reader_write(f.file, before.tensors, before.count, reader_metadata(&before), text), "%s", text);
    CHECKF(reader_open(f.file, &after, text), "%s", text);
    assert_int_equal(after.count, before.count);
    CHECK(json_equal(reader_metadata(&before), reader_metadata(&after)));
    for (size_t i = 0; i < after.count; i++) {
        const reader_tensor *x = &before.tensors[i], *y = &after.tensors[i];
        assert_string_equal(x->name, y->name);
        CHECK(x->view.dtype == y->view.dtype && x->view.ndim == y->view.ndim && x->bytes == y->bytes);
        assert_memory_equal(x->view.shape, y->view.shape, sizeof x->view.shape);
        if (x->bytes > 0)
            assert_memory_equal(x->view.data, y->view.data, x->bytes);
        CHECK(after.copies[i] == NULL); /* all are aligned in a file of ours */
    }
    reader_close(&after);
    CHECK(!reader_write(f.path, before.tensors, before.count, NULL, text));
    reader_close(&before);
    free(bytes.bytes);
    unlink(f.file);
    rmdir(f.path);
}

static void names_dtypes(void **state)
{
    (void)state;
    assert_string_equal(reader_dtype_name(CSA_E4M3), "F8_E4M3");
    assert_string_equal(reader_dtype_name(0), "?");
    assert_int_equal(reader_element(CSA_BF16), 2);
    assert_int_equal(reader_element(0), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(reads_what_is_right),
        cmocka_unit_test(refuses_every_truncation),
        cmocka_unit_test(refuses_impossible_lengths),
        cmocka_unit_test(refuses_wrong_entries),
        cmocka_unit_test(refuses_overlaps_and_gaps),
        cmocka_unit_test(refuses_deep_json),
        cmocka_unit_test(refuses_what_is_no_file),
        cmocka_unit_test(writes_what_it_reads),
        cmocka_unit_test(names_dtypes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
