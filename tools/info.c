/*
 * csa info: what this build is, and what it can use here.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "options.h"

#include <jansson.h>
#include <stdio.h>
#include <string.h>
#include <sys/utsname.h>

static const char help[] =
    "usage: csa info [--json]\n"
    "\n"
    "The library's version, its back ends (and why one cannot be used here), threads, the processor's\n"
    "instruction sets, and the sizes the library accepts.\n"
    "\n"
    "examples:\n"
    "  csa info\n"
    "  csa info --json\n";

/* What of a processor's features matters to the kind of code that runs here. */
static const char *const known_features[] = {
    "sse4_2",   "avx",      "avx2",        "fma",         "f16c",        "avx_vnni",    "avx512f",  "avx512bw",
    "avx512vl", "avx512dq", "avx512_vbmi", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_int8",
    "amx_bf16", "asimd",    "asimddp",     "sve",         "sve2",        "bf16",        "i8mm",
};
enum { KNOWN_FEATURES = sizeof known_features / sizeof *known_features };

typedef struct processor {
    char machine[65];
    char model[128];
    bool features[KNOWN_FEATURES];
} processor;

static void note_features(processor *p, char *list)
{
    char *rest;
    for (char *word = strtok_r(list, " \n", &rest); word; word = strtok_r(NULL, " \n", &rest))
        for (int i = 0; i < KNOWN_FEATURES; i++)
            p->features[i] |= strcmp(word, known_features[i]) == 0;
}

/* The first processor's lines of /proc/cpuinfo; what the system does not say stays unknown. */
static processor read_processor(void)
{
    processor p = {.machine = "unknown", .model = "unknown"};
    struct utsname name;
    if (uname(&name) == 0)
        snprintf(p.machine, sizeof p.machine, "%.64s", name.machine);
    FILE *file = fopen("/proc/cpuinfo", "r");
    if (!file)
        return p;
    static char line[16384];
    while (fgets(line, sizeof line, file) && line[0] != '\n') {
        char *value = strchr(line, ':');
        if (!value)
            continue;
        value += strspn(value, ": \t");
        value[strcspn(value, "\n")] = '\0';
        if (strncmp(line, "model name", 10) == 0)
            snprintf(p.model, sizeof p.model, "%s", value);
        else if (strncmp(line, "flags", 5) == 0 || strncmp(line, "Features", 8) == 0)
            note_features(&p, value);
    }
    fclose(file);
    return p;
}

/* The devices of a back end, each with what it is or why it cannot be used. */
static json_t *devices_json(csa_backend backend)
{
    json_t *list = json_array();
    char text[256];
    for (int32_t device = 0;; device++) {
        csa_status status = csa_device_describe(backend, device, text, sizeof text);
        if (status != CSA_OK && status != CSA_ERROR_UNSUPPORTED)
            return list;
        json_array_append_new(list,
                              json_pack("{s:b, s:s}", "available", status == CSA_OK, "description", text));
    }
}

static json_t *backends_json(void)
{
    json_t *list = json_array();
    for (int i = CSA_BACKEND_DEFAULT; i <= CSA_BACKEND_CUDA; i++) {
        char text[256] = "";
        csa_status status = csa_backend_describe((csa_backend)i, text, sizeof text);
        json_array_append_new(list, json_pack("{s:s, s:b, s:s, s:o}", "name", csa_backend_name((csa_backend)i),
                                              "available", status == CSA_OK, "description", text, "devices",
                                              devices_json((csa_backend)i)));
    }
    return list;
}

static json_t *processor_json(void)
{
    processor p = read_processor();
    json_t *features = json_array();
    for (int i = 0; i < KNOWN_FEATURES; i++)
        if (p.features[i])
            json_array_append_new(features, json_string(known_features[i]));
    return json_pack("{s:s, s:s, s:o}", "machine", p.machine, "model", p.model, "instruction_sets", features);
}

static json_t *sizes_json(void)
{
    return json_pack("{s:i, s:i, s:i, s:i, s:i, s:i, s:[i,i,i,i], s:[i,i,i,i,i,i,i,i,i]}", "region", CSA_REGION,
                     "head_size", CSA_HEAD_SIZE, "summary_size", CSA_SUMMARY_SIZE, "max_groups", CSA_MAX_GROUPS,
                     "max_heads", CSA_MAX_HEADS, "max_topk", CSA_MAX_TOPK, "block_sizes", 16, 32, 64, 128,
                     "index_heads", 1, 2, 3, 4, 5, 6, 7, 8, 16);
}

static int ask_threads(int32_t *threads)
{
    csa_context *context;
    csa_status status = csa_context_create(NULL, &context);
    if (status)
        return tool_library_error("info", "csa_context_create", status);
    *threads = csa_context_threads(context);
    csa_context_destroy(context);
    return TOOL_OK;
}

static const char *string(const json_t *object, const char *key)
{
    const char *value = json_string_value(json_object_get(object, key));
    return value ? value : "";
}

static void print_words(const char *title, const json_t *list)
{
    printf("%s:", title);
    for (size_t i = 0; i < json_array_size(list); i++) {
        const json_t *item = json_array_get(list, i);
        if (json_is_string(item))
            printf(" %s", json_string_value(item));
        else
            printf(" %" JSON_INTEGER_FORMAT, json_integer_value(item));
    }
    putchar('\n');
}

static void print_backend(const json_t *b)
{
    size_t index;
    json_t *device;
    printf("  %-8s %-13s %s\n", string(b, "name"),
           json_is_true(json_object_get(b, "available")) ? "available" : "not available",
           string(b, "description"));
    json_array_foreach (json_object_get(b, "devices"), index, device)
        printf("  %-8s %-13s device %zu: %s\n", "", "", index, string(device, "description"));
}

static void print_text(const json_t *root)
{
    const json_t *cpu = json_object_get(root, "processor"), *sizes = json_object_get(root, "sizes");
    const json_t *backends = json_object_get(root, "backends");
    printf("libcsa %s (header %s)\n\nback ends\n", string(root, "version"), string(root, "header_version"));
    for (size_t i = 0; i < json_array_size(backends); i++)
        print_backend(json_array_get(backends, i));
    printf("\nprocessor: %s, %s\n", string(cpu, "model"), string(cpu, "machine"));
    print_words("instruction sets", json_object_get(cpu, "instruction_sets"));
    printf("threads: %" JSON_INTEGER_FORMAT "\n", json_integer_value(json_object_get(root, "threads")));
    printf("\nsizes: regions of %d tokens, heads of %d, summaries of %d; up to %d groups of up to %d heads, "
           "topk up "
           "to %d\n",
           CSA_REGION, CSA_HEAD_SIZE, CSA_SUMMARY_SIZE, CSA_MAX_GROUPS, CSA_MAX_HEADS, CSA_MAX_TOPK);
    print_words("block sizes", json_object_get(sizes, "block_sizes"));
    print_words("index heads per group", json_object_get(sizes, "index_heads"));
}

int tool_info(int argc, char **argv)
{
    bool json = false;
    int code;
    int32_t threads = 0;
    const tool_option table[] = {{"--json", OPTION_FLAG, &json, 0, 0}};
    if (!tool_options(argc, argv, table, 1, help, &code))
        return code;
    code = ask_threads(&threads);
    if (code != TOOL_OK)
        return code;
    char header[16];
    snprintf(header, sizeof header, "%d.%d.%d", CSA_VERSION_MAJOR, CSA_VERSION_MINOR, CSA_VERSION_PATCH);
    json_t *root = json_pack("{s:s, s:s, s:o, s:i, s:o, s:o}", "version", csa_version_string(),
                             "header_version", header, "backends", backends_json(), "threads", threads,
                             "processor", processor_json(), "sizes", sizes_json());
    if (json)
        return tool_print_json("info", root);
    print_text(root);
    json_decref(root);
    return TOOL_OK;
}
