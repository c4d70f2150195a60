/* SPDX-License-Identifier: Apache-2.0 */
/* topology_parse.c - reads a topology text.
 *
 * One statement per line: a keyword, then key=value words. `#` starts a comment, a backslash at the end of a line joins the next, double
 * quotes keep spaces. A `model` gives a kind of GPU a name; a `gpu` starts from its model and may override any of its keys. Every mistake
 * is refused with "file:line: expected ..., found ...": a simulated node that silently differs from its text would make tests lie. */
#include "simulated_driver/topology.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "nvml_abi.h"
#include "simulated_driver/mig.h"

#define MAX_MODELS 8
#define MAX_WORDS  64
#define MAX_LINE   4096

struct word {
	char *key;      /* NULL for a bare word */
	char *value;
};

struct model {
	char name[SIM_NAME_LEN];
	struct sim_gpu gpu;
};

struct parser {
	const char *file;
	unsigned line;
	struct sim_topology *topology;
	struct sim_topology_error *error;
	struct model models[MAX_MODELS];
	unsigned n_models;
};

__attribute__((format(printf, 2, 3))) static bool refuse(struct parser *p, const char *format, ...)
{
	va_list args;
	int used = p->line ? snprintf(p->error->message, sizeof p->error->message, "%s:%u: ", p->file, p->line)
			   : snprintf(p->error->message, sizeof p->error->message, "%s: ", p->file);
	size_t at = (size_t)used < sizeof p->error->message ? (size_t)used : sizeof p->error->message - 1;
	va_start(args, format);
	vsnprintf(p->error->message + at, sizeof p->error->message - at, format, args);
	va_end(args);
	return false;
}

/* ---- values ---- */

static bool parse_unsigned(const char *text, char **end, uint64_t *out)
{
	if (*text < '0' || *text > '9')
		return false;
	errno = 0;
	*out = strtoull(text, end, 0);
	return errno == 0;
}

static bool parse_whole(const char *text, uint64_t *out)
{
	char *end;
	return parse_unsigned(text, &end, out) && *end == '\0';
}

static bool parse_count(struct parser *p, const struct word *w, uint64_t limit, uint32_t *out)
{
	uint64_t value;
	if (!parse_whole(w->value, &value) || value > limit)
		return refuse(p, "%s: expected a number from 0 to %llu, found \"%s\"", w->key, (unsigned long long)limit, w->value);
	*out = (uint32_t)value;
	return true;
}

/* A number and exactly this unit, "1980MHz". */
static bool parse_with_unit(struct parser *p, const struct word *w, const char *unit, uint64_t scale, uint32_t *out)
{
	uint64_t value;
	char *end;
	if (!parse_unsigned(w->value, &end, &value) || strcmp(end, unit) || value > UINT32_MAX / scale)
		return refuse(p, "%s: expected a number with unit %s, found \"%s\"", w->key, unit, w->value);
	*out = (uint32_t)(value * scale);
	return true;
}

static bool parse_bytes_text(const char *text, char **end, uint64_t *out)
{
	static const struct {
		const char *unit;
		unsigned shift;
	} units[] = { { "KiB", 10 }, { "MiB", 20 }, { "GiB", 30 } };
	uint64_t value;
	if (!parse_unsigned(text, end, &value) || value >= 1ull << 32)
		return false;
	for (size_t i = 0; i < sizeof units / sizeof *units; i++)
		if (strncmp(*end, units[i].unit, 3) == 0) {
			*end += 3;
			*out = value << units[i].shift;
			return true;
		}
	return false;
}

static bool parse_bytes(struct parser *p, const struct word *w, uint64_t *out)
{
	char *end;
	if (!parse_bytes_text(w->value, &end, out) || *end)
		return refuse(p, "%s: expected a size with unit KiB, MiB or GiB, found \"%s\"", w->key, w->value);
	return true;
}

static bool parse_text(struct parser *p, const struct word *w, char *out, size_t size)
{
	if (strlen(w->value) >= size)
		return refuse(p, "%s: expected at most %zu characters, found \"%s\"", w->key, size - 1, w->value);
	memset(out, 0, size);
	memcpy(out, w->value, strlen(w->value));
	return true;
}

static bool parse_pci(struct parser *p, const struct word *w, struct sim_pci_address *out)
{
	char extra;
	if (sscanf(w->value, "%x:%x:%x.0%c", &out->domain, &out->bus, &out->device, &extra) != 3 || out->bus > 0xff || out->device > 0x1f)
		return refuse(p, "%s: expected a PCI address like 0000:18:00.0, found \"%s\"", w->key, w->value);
	return true;
}

static bool is_uuid(const char *text, const char *prefix)
{
	size_t n = strlen(prefix);
	if (strncmp(text, prefix, n) || strlen(text) != n + 36)
		return false;
	for (size_t i = 0; i < 36; i++) {
		bool dash = i == 8 || i == 13 || i == 18 || i == 23;
		if (dash ? text[n + i] != '-' : !strchr("0123456789abcdef", text[n + i]))
			return false;
	}
	return true;
}

static bool parse_switch(struct parser *p, const struct word *w, uint32_t *out)
{
	*out = strcmp(w->value, "on") == 0;
	if (!*out && strcmp(w->value, "off"))
		return refuse(p, "%s: expected on or off, found \"%s\"", w->key, w->value);
	return true;
}

/* A word out of a fixed set. */
struct choice {
	const char *name;
	uint32_t value;
};

static bool parse_choice(struct parser *p, const struct word *w, const struct choice *choices, uint32_t *out)
{
	char names[256] = "";
	for (; choices->name; choices++) {
		if (strcmp(choices->name, w->value) == 0) {
			*out = choices->value;
			return true;
		}
		snprintf(names + strlen(names), sizeof names - strlen(names), "%s%s", *names ? ", " : "", choices->name);
	}
	return refuse(p, "%s: expected one of %s, found \"%s\"", w->key, names, w->value);
}

/* Numbers and ranges, "0-3,8", as a bit mask. */
static bool parse_set(struct parser *p, const struct word *w, uint32_t limit, uint64_t *mask)
{
	const char *at = w->value;
	do {
		uint64_t first, last;
		char *end;
		if (!parse_unsigned(at, &end, &first))
			break;
		last = first;
		if (*end == '-' && !parse_unsigned(end + 1, &end, &last))
			break;
		if (first > last || last >= limit)
			break;
		for (uint64_t n = first; n <= last; n++)
			mask[n / 64] |= 1ull << n % 64;
		if (*end == '\0')
			return true;
		at = end + 1;
		if (*end != ',')
			break;
	} while (true);
	return refuse(p, "%s: expected numbers below %u like 0-3,8, found \"%s\"", w->key, limit, w->value);
}

static bool parse_size_list(struct parser *p, const struct word *w, uint64_t *out, size_t count)
{
	char *at = w->value;
	for (size_t i = 0; i < count; i++) {
		if (!parse_bytes_text(at, &at, &out[i]))
			return refuse(p, "%s: expected %zu sizes like 9728MiB,19968MiB, found \"%s\"", w->key, count, w->value);
		if (*at == ',')
			at++;
		else if (*at == '\0')
			return true;
	}
	return *at == '\0' || refuse(p, "%s: expected at most %zu sizes, found \"%s\"", w->key, count, w->value);
}

static bool parse_count_list(struct parser *p, const struct word *w, uint32_t *out, size_t count)
{
	char *at = w->value;
	for (size_t i = 0; i < count; i++) {
		uint64_t value;
		if (!parse_unsigned(at, &at, &value) || value > UINT32_MAX || (*at && *at != ','))
			return refuse(p, "%s: expected %zu numbers like 14,14,28, found \"%s\"", w->key, count, w->value);
		out[i] = (uint32_t)value;
		if (*at == '\0')
			return i + 1 == count || refuse(p, "%s: expected %zu numbers, found %zu in \"%s\"", w->key, count, i + 1, w->value);
		at++;
	}
	return refuse(p, "%s: expected at most %zu numbers, found \"%s\"", w->key, count, w->value);
}

/* ---- the keys of a GPU ---- */

enum kind {
	KIND_TEXT,
	KIND_BYTES,
	KIND_COUNT,
	KIND_MHZ,
	KIND_WATT,
	KIND_CELSIUS,
	KIND_MBPS,
	KIND_SWITCH,
	KIND_PCI,
	KIND_COMPUTE,
	KIND_BRAND,
	KIND_ARCHITECTURE,
	KIND_MIG_FAMILY,
	KIND_MIG_MEMORY,
	KIND_MIG_SMS,
	KIND_UUID
};

struct gpu_key {
	const char *name;
	enum kind kind;
	size_t offset, size;
};

#define KEY(name, kind, field) { name, kind, offsetof(struct sim_gpu, field), sizeof(((struct sim_gpu *)0)->field) }

static const struct gpu_key gpu_keys[] = {
	KEY("name", KIND_TEXT, name),
	KEY("uuid", KIND_UUID, uuid),
	KEY("serial", KIND_TEXT, serial),
	KEY("part", KIND_TEXT, board_part_number),
	KEY("vbios", KIND_TEXT, vbios_version),
	KEY("brand", KIND_BRAND, brand),
	KEY("architecture", KIND_ARCHITECTURE, architecture),
	KEY("compute", KIND_COMPUTE, compute_major),
	KEY("memory", KIND_BYTES, memory_bytes),
	KEY("reserved", KIND_BYTES, memory_reserved_bytes),
	KEY("bar1", KIND_BYTES, bar1_bytes),
	KEY("context", KIND_BYTES, context_bytes),
	KEY("l2", KIND_BYTES, l2_cache_bytes),
	KEY("bus-bits", KIND_COUNT, memory_bus_bits),
	KEY("ecc", KIND_SWITCH, ecc_enabled),
	KEY("sms", KIND_COUNT, sm_count),
	KEY("cores", KIND_COUNT, core_count),
	KEY("clock", KIND_MHZ, graphics_clock_mhz),
	KEY("memory-clock", KIND_MHZ, memory_clock_mhz),
	KEY("video-clock", KIND_MHZ, video_clock_mhz),
	KEY("idle-clock", KIND_MHZ, idle_graphics_clock_mhz),
	KEY("idle-memory-clock", KIND_MHZ, idle_memory_clock_mhz),
	KEY("power-idle", KIND_WATT, power_idle_mw),
	KEY("power-limit", KIND_WATT, power_limit_mw),
	KEY("power-min", KIND_WATT, power_limit_min_mw),
	KEY("power-max", KIND_WATT, power_limit_max_mw),
	KEY("temperature-idle", KIND_CELSIUS, temperature_idle_c),
	KEY("temperature-busy", KIND_CELSIUS, temperature_busy_c),
	KEY("temperature-slowdown", KIND_CELSIUS, temperature_slowdown_c),
	KEY("temperature-shutdown", KIND_CELSIUS, temperature_shutdown_c),
	KEY("pci", KIND_PCI, pci),
	KEY("device-id", KIND_COUNT, pci_device_id),
	KEY("subsystem-id", KIND_COUNT, pci_subsystem_id),
	KEY("pcie-generation", KIND_COUNT, pcie_generation),
	KEY("pcie-width", KIND_COUNT, pcie_width),
	KEY("numa", KIND_COUNT, numa_node),
	KEY("bridge", KIND_COUNT, host_bridge),
	KEY("port", KIND_COUNT, root_port),
	KEY("switch", KIND_COUNT, pcie_switch),
	KEY("nvlink-generation", KIND_COUNT, nvlink_version),
	KEY("nvlink-speed", KIND_MBPS, nvlink_mbps),
	KEY("mig", KIND_MIG_FAMILY, mig_family),
	KEY("mig-memory", KIND_MIG_MEMORY, mig_memory_bytes),
	KEY("mig-sms", KIND_MIG_SMS, mig_sm_counts),
	KEY("mig-mode", KIND_SWITCH, mig_enabled),
};

static const struct choice brands[] = { { "nvidia", NVML_BRAND_NVIDIA },
					{ "tesla", NVML_BRAND_TESLA },
					{ "rtx", NVML_BRAND_NVIDIA_RTX },
					{ "geforce", NVML_BRAND_GEFORCE },
					{ NULL, 0 } };
static const struct choice architectures[] = { { "volta", NVML_DEVICE_ARCH_VOLTA },
					       { "turing", NVML_DEVICE_ARCH_TURING },
					       { "ampere", NVML_DEVICE_ARCH_AMPERE },
					       { "ada", NVML_DEVICE_ARCH_ADA },
					       { "hopper", NVML_DEVICE_ARCH_HOPPER },
					       { "blackwell", NVML_DEVICE_ARCH_BLACKWELL },
					       { NULL, 0 } };
static const struct choice mig_families[] = {
	{ "none", SIM_MIG_NONE }, { "7-slices", SIM_MIG_7_SLICES }, { "4-slices", SIM_MIG_4_SLICES }, { NULL, 0 }
};

static bool parse_gpu_value(struct parser *p, const struct word *w, const struct gpu_key *key, struct sim_gpu *gpu)
{
	void *field = (char *)gpu + key->offset;
	switch (key->kind) {
	case KIND_TEXT: return parse_text(p, w, field, key->size);
	case KIND_BYTES: return parse_bytes(p, w, field);
	case KIND_COUNT: return parse_count(p, w, UINT32_MAX, field);
	case KIND_MHZ: return parse_with_unit(p, w, "MHz", 1, field);
	case KIND_WATT: return parse_with_unit(p, w, "W", 1000, field);
	case KIND_CELSIUS: return parse_with_unit(p, w, "C", 1, field);
	case KIND_MBPS: return parse_with_unit(p, w, "MB/s", 1, field);
	case KIND_SWITCH: return parse_switch(p, w, field);
	case KIND_PCI: return parse_pci(p, w, field);
	case KIND_BRAND: return parse_choice(p, w, brands, field);
	case KIND_ARCHITECTURE: return parse_choice(p, w, architectures, field);
	case KIND_MIG_FAMILY: return parse_choice(p, w, mig_families, field);
	case KIND_MIG_MEMORY: return parse_size_list(p, w, field, SIM_MIG_SIZES);
	case KIND_MIG_SMS: return parse_count_list(p, w, field, SIM_MIG_SHAPES);
	case KIND_COMPUTE: {
		char extra;
		return sscanf(w->value, "%u.%u%c", &gpu->compute_major, &gpu->compute_minor, &extra) == 2 ||
		       refuse(p, "%s: expected a compute capability like 9.0, found \"%s\"", w->key, w->value);
	}
	case KIND_UUID:
		if (!is_uuid(w->value, "GPU-"))
			return refuse(p, "%s: expected GPU- and 32 lower-case hex digits in groups of 8-4-4-4-12, found \"%s\"", w->key,
				      w->value);
		return parse_text(p, w, field, key->size);
	}
	return refuse(p, "%s: unknown kind of value", w->key);
}

static bool parse_gpu_words(struct parser *p, const struct word *words, unsigned n_words, struct sim_gpu *gpu)
{
	for (unsigned i = 0; i < n_words; i++) {
		const struct gpu_key *key = NULL;
		for (size_t k = 0; words[i].key && k < sizeof gpu_keys / sizeof *gpu_keys; k++)
			if (strcmp(gpu_keys[k].name, words[i].key) == 0)
				key = &gpu_keys[k];
		if (!key)
			return refuse(p, "expected a key of a GPU, found \"%s\"", words[i].key ? words[i].key : words[i].value);
		if (!parse_gpu_value(p, &words[i], key, gpu))
			return false;
	}
	return true;
}

/* ---- statements ---- */

/* Takes the value of `key` out of the words, so that what is left over can be refused. */
static const struct word *take(struct word *words, unsigned *n_words, const char *key, struct word *out)
{
	for (unsigned i = 0; i < *n_words; i++)
		if (words[i].key && strcmp(words[i].key, key) == 0) {
			*out = words[i];
			memmove(&words[i], &words[i + 1], (*n_words - i - 1) * sizeof *words);
			--*n_words;
			return out;
		}
	return NULL;
}

static bool nothing_left(struct parser *p, const struct word *words, unsigned n_words, const char *statement)
{
	return n_words == 0 || refuse(p, "%s: unexpected \"%s\"", statement, words[0].key ? words[0].key : words[0].value);
}

/* The bare number after a keyword: `gpu 3`, `numa 0`. */
static bool take_number(struct parser *p, struct word *words, unsigned *n_words, const char *statement, uint32_t limit, uint32_t *out)
{
	uint64_t value;
	if (*n_words == 0 || words[0].key || !parse_whole(words[0].value, &value) || value >= limit)
		return refuse(p, "%s: expected a number below %u after the keyword, found \"%s\"", statement, limit,
			      *n_words ? (words[0].key ? words[0].key : words[0].value) : "nothing");
	*out = (uint32_t)value;
	memmove(words, words + 1, (*n_words - 1) * sizeof *words);
	--*n_words;
	return true;
}

static bool statement_topology(struct parser *p, struct word *words, unsigned n)
{
	struct word w;
	if (!take(words, &n, "name", &w))
		return refuse(p, "topology: expected name=...");
	if (!parse_text(p, &w, p->topology->name, sizeof p->topology->name))
		return false;
	if (take(words, &n, "node", &w) && !parse_text(p, &w, p->topology->node_name, sizeof p->topology->node_name))
		return false;
	return nothing_left(p, words, n, "topology");
}

/* Without cuda=... the version is that of NVIDIA's driver. */
static bool statement_driver(struct parser *p, struct word *words, unsigned n)
{
	struct word cuda, version;
	struct sim_topology *t = p->topology;
	bool has_cuda = take(words, &n, "cuda", &cuda);
	if (!take(words, &n, "version", &version))
		return refuse(p, "driver: expected version=...");
	t->cuda_version = sim_topology_cuda_of_driver(version.value);
	if (has_cuda) {
		unsigned major, minor;
		char extra;
		if (sscanf(cuda.value, "%u.%u%c", &major, &minor, &extra) != 2 || major > 1000 || minor > 99)
			return refuse(p, "cuda: expected a CUDA version like 13.0, found \"%s\"", cuda.value);
		t->cuda_version = (int32_t)(major * 1000 + minor * 10);
	}
	if (!sim_topology_set_driver(t, version.value))
		return refuse(p, "version: expected a driver version like 580.159.03, found \"%s\"", version.value);
	if (t->cuda_version == 0)
		return refuse(p, "version: expected a driver of 440 or newer, or cuda=... beside it, found \"%s\"", version.value);
	return nothing_left(p, words, n, "driver");
}

static bool statement_model(struct parser *p, struct word *words, unsigned n)
{
	if (n == 0 || words[0].key)
		return refuse(p, "model: expected its name after the keyword");
	if (p->n_models == MAX_MODELS)
		return refuse(p, "model: expected at most %d models", MAX_MODELS);
	struct model *model = &p->models[p->n_models++];
	struct word name = { .key = "model", .value = words[0].value };
	return parse_text(p, &name, model->name, sizeof model->name) && parse_gpu_words(p, words + 1, n - 1, &model->gpu);
}

static bool statement_numa(struct parser *p, struct word *words, unsigned n)
{
	struct word w;
	uint32_t node = 0;
	if (!take_number(p, words, &n, "numa", SIM_MAX_NUMA_NODES, &node))
		return false;
	if (!take(words, &n, "cpus", &w))
		return refuse(p, "numa: expected cpus=...");
	p->topology->numa_nodes[node].present = 1;
	if (p->topology->n_numa_nodes <= node)
		p->topology->n_numa_nodes = node + 1;
	return parse_set(p, &w, SIM_MAX_CPUS, p->topology->numa_nodes[node].cpu_mask) && nothing_left(p, words, n, "numa");
}

static bool statement_switch(struct parser *p, struct word *words, unsigned n)
{
	struct word w;
	uint32_t index = 0;
	if (!take_number(p, words, &n, "switch", SIM_MAX_SWITCHES, &index))
		return false;
	if (index != p->topology->n_switches)
		return refuse(p, "switch: expected number %u next, found %u", p->topology->n_switches, index);
	if (!take(words, &n, "pci", &w))
		return refuse(p, "switch: expected pci=...");
	p->topology->n_switches++;
	return parse_pci(p, &w, &p->topology->switches[index].pci) && nothing_left(p, words, n, "switch");
}

static const struct model *find_model(const struct parser *p, const char *name)
{
	for (unsigned i = 0; i < p->n_models; i++)
		if (strcmp(p->models[i].name, name) == 0)
			return &p->models[i];
	return NULL;
}

static bool statement_gpu(struct parser *p, struct word *words, unsigned n)
{
	struct word w;
	uint32_t minor = 0;
	if (!take_number(p, words, &n, "gpu", SIM_MAX_GPUS, &minor))
		return false;
	if (minor != p->topology->n_gpus)
		return refuse(p, "gpu: expected minor number %u next, found %u", p->topology->n_gpus, minor);
	if (!take(words, &n, "model", &w))
		return refuse(p, "gpu: expected model=...");
	const struct model *model = find_model(p, w.value);
	if (!model)
		return refuse(p, "model: expected a model of an earlier line, found \"%s\"", w.value);
	struct sim_gpu *gpu = &p->topology->gpus[p->topology->n_gpus++];
	*gpu = model->gpu;
	gpu->minor = minor;
	if (!parse_gpu_words(p, words, n, gpu))
		return false;
	if (gpu->memory_bytes == 0 || gpu->sm_count == 0)
		return refuse(p, "gpu: expected memory=... and sms=... in the gpu or its model");
	if (gpu->memory_reserved_bytes + gpu->context_bytes >= gpu->memory_bytes)
		return refuse(p, "gpu: expected reserved and context to leave some of memory");
	if (gpu->mig_enabled && gpu->mig_family == SIM_MIG_NONE)
		return refuse(p, "mig-mode: expected a model with mig=7-slices or mig=4-slices");
	return true;
}

/* The GPUs named by gpus=0-7. */
static bool take_gpus(struct parser *p, struct word *words, unsigned *n, const char *statement, uint64_t *mask)
{
	struct word w;
	if (!take(words, n, "gpus", &w))
		return refuse(p, "%s: expected gpus=...", statement);
	return parse_set(p, &w, p->topology->n_gpus, mask);
}

/* What the links of an nvlink statement lead to. */
static bool take_peer(struct parser *p, struct word *words, unsigned *n, struct sim_nvlink *link)
{
	struct word w;
	if (take(words, n, "to-switch", &w)) {
		link->peer_kind = SIM_LINK_SWITCH;
		if (p->topology->n_switches == 0)
			return refuse(p, "to-switch: expected a switch of an earlier line, found \"%s\"", w.value);
		return parse_count(p, &w, p->topology->n_switches - 1, &link->peer);
	}
	if (take(words, n, "to-gpu", &w)) {
		link->peer_kind = SIM_LINK_GPU;
		return parse_count(p, &w, p->topology->n_gpus - 1, &link->peer);
	}
	return refuse(p, "nvlink: expected to-switch=... or to-gpu=...");
}

static bool statement_nvlink(struct parser *p, struct word *words, unsigned n)
{
	struct word w;
	struct sim_nvlink link = { 0 };
	uint64_t gpus = 0, links = 0;
	if (!take_gpus(p, words, &n, "nvlink", &gpus) || !take_peer(p, words, &n, &link))
		return false;
	if (take(words, &n, "peer-link", &w) && !parse_count(p, &w, SIM_MAX_NVLINKS - 1, &link.peer_link))
		return false;
	if (!take(words, &n, "links", &w))
		return refuse(p, "nvlink: expected links=...");
	if (!parse_set(p, &w, SIM_MAX_NVLINKS, &links))
		return false;
	for (uint32_t g = 0; g < p->topology->n_gpus; g++) {
		struct sim_gpu *gpu = &p->topology->gpus[g];
		if (!(gpus & 1ull << g))
			continue;
		if (gpu->nvlink_version == 0)
			return refuse(p, "nvlink: expected GPU %u to have nvlink-generation=...", g);
		struct sim_nvlink next = link;
		for (uint32_t l = 0; l < SIM_MAX_NVLINKS; l++) {
			if (!(links & 1ull << l))
				continue;
			gpu->nvlinks[l] = next;
			next.peer_link++;
			if (gpu->nvlink_count <= l)
				gpu->nvlink_count = l + 1;
		}
	}
	return nothing_left(p, words, n, "nvlink");
}

static bool parse_uuid_bytes(const char *text, uint8_t out[16])
{
	char with_prefix[64];
	snprintf(with_prefix, sizeof with_prefix, "GPU-%s", text);
	if (!is_uuid(with_prefix, "GPU-"))
		return false;
	for (unsigned i = 0; i < 16; i++, text += 2) {
		unsigned byte;
		text += *text == '-';
		if (sscanf(text, "%2x", &byte) != 1)
			return false;
		out[i] = (uint8_t)byte;
	}
	return true;
}

static bool statement_fabric(struct parser *p, struct word *words, unsigned n)
{
	struct word w;
	uint64_t gpus = 0;
	uint32_t clique = 0;
	uint8_t cluster[16] = { 0 };
	if (!take_gpus(p, words, &n, "fabric", &gpus))
		return false;
	if (take(words, &n, "clique", &w) && !parse_count(p, &w, UINT32_MAX, &clique))
		return false;
	if (take(words, &n, "cluster", &w) && !parse_uuid_bytes(w.value, cluster))
		return refuse(p, "cluster: expected 32 lower-case hex digits in groups of 8-4-4-4-12, found \"%s\"", w.value);
	for (uint32_t g = 0; g < p->topology->n_gpus; g++)
		if (gpus & 1ull << g) {
			p->topology->gpus[g].fabric_attached = 1;
			p->topology->gpus[g].fabric_clique = clique;
			memcpy(p->topology->gpus[g].fabric_cluster_uuid, cluster, sizeof cluster);
		}
	return nothing_left(p, words, n, "fabric");
}

static bool statement_mig(struct parser *p, struct word *words, unsigned n)
{
	struct word gpu_word, w;
	uint32_t minor = 0, failed;
	if (!take(words, &n, "gpu", &gpu_word))
		return refuse(p, "mig: expected gpu=...");
	if (p->topology->n_gpus == 0 || !parse_count(p, &gpu_word, p->topology->n_gpus - 1, &minor))
		return refuse(p, "gpu: expected a GPU of an earlier line, found \"%s\"", gpu_word.value);
	struct sim_gpu *gpu = &p->topology->gpus[minor];
	if (!gpu->mig_enabled)
		return refuse(p, "gpu: expected a GPU with mig-mode=on, found \"%s\"", gpu_word.value);
	if (gpu->n_initial_mig == SIM_MAX_INITIAL_MIG)
		return refuse(p, "mig: expected at most %d instances on GPU %u", SIM_MAX_INITIAL_MIG, minor);
	struct sim_initial_mig *initial = &gpu->initial_mig[gpu->n_initial_mig];
	if (!take(words, &n, "profile", &w))
		return refuse(p, "mig: expected profile=...");
	const struct sim_mig_profile *profile = sim_mig_profile_by_name(gpu, w.value);
	if (!profile)
		return refuse(p, "profile: expected a MIG profile of %s, found \"%s\"", gpu->name, w.value);
	initial->profile_id = profile->id;
	if (!take(words, &n, "start", &w))
		return refuse(p, "mig: expected start=... (a memory slice)");
	if (!parse_count(p, &w, 7, &initial->placement_start))
		return false;
	gpu->n_initial_mig++;
	struct sim_mig trial;
	if (!sim_mig_boot(&trial, gpu, &failed))
		return refuse(p, "start: expected a start where this profile fits beside the instances before it, found \"%s\"", w.value);
	return nothing_left(p, words, n, "mig");
}

static const struct {
	const char *keyword;
	bool (*parse)(struct parser *p, struct word *words, unsigned n_words);
} statements[] = {
	{ "topology", statement_topology }, { "driver", statement_driver }, { "model", statement_model },
	{ "numa", statement_numa },         { "switch", statement_switch }, { "gpu", statement_gpu },
	{ "nvlink", statement_nvlink },     { "fabric", statement_fabric }, { "mig", statement_mig },
};

/* ---- lines ---- */

/* Cuts one line into words, in place. */
static bool split(struct parser *p, char *line, struct word *words, unsigned *n_words)
{
	*n_words = 0;
	for (char *at = line; *at;) {
		if (*at == ' ' || *at == '\t') {
			at++;
			continue;
		}
		if (*at == '#')
			return true;
		if (*n_words == MAX_WORDS)
			return refuse(p, "expected at most %d words in a statement", MAX_WORDS);
		struct word *word = &words[(*n_words)++];
		*word = (struct word){ .value = at };
		char *out = at;
		bool quoted = false;
		for (; *at && (quoted || (*at != ' ' && *at != '\t')); at++) {
			if (*at == '"') {
				quoted = !quoted;
			} else if (*at == '=' && !quoted && !word->key) {
				*out++ = '\0';
				word->key = word->value;
				word->value = out;
			} else {
				*out++ = *at;
			}
		}
		if (quoted)
			return refuse(p, "expected a closing quote");
		if (*at)
			at++;
		*out = '\0';
	}
	return true;
}

static bool parse_statement(struct parser *p, char *line)
{
	struct word words[MAX_WORDS];
	unsigned n;
	if (!split(p, line, words, &n))
		return false;
	if (n == 0)
		return true;
	for (size_t i = 0; !words[0].key && i < sizeof statements / sizeof *statements; i++)
		if (strcmp(statements[i].keyword, words[0].value) == 0)
			return statements[i].parse(p, words + 1, n - 1);
	return refuse(p, "expected topology, driver, model, numa, switch, gpu, nvlink, fabric or mig, found \"%s\"",
		      words[0].key ? words[0].key : words[0].value);
}

/* Appends the text from `at` to `end` to the statement so far, and a space. */
static bool append(struct parser *p, char statement[MAX_LINE], size_t *used, const char *at, const char *end)
{
	size_t size = (size_t)(end - at);
	if (size + 2 > MAX_LINE - *used)
		return refuse(p, "expected a statement of at most %d characters", MAX_LINE - 2);
	memcpy(statement + *used, at, size);
	*used += size;
	statement[(*used)++] = ' ';
	statement[*used] = '\0';
	return true;
}

static bool parse_lines(struct parser *p, const char *text, size_t length)
{
	char statement[MAX_LINE] = "";
	size_t used = 0;
	unsigned number = 0;
	const char *end = text + length;
	for (const char *at = text, *next; at < end; at = next) {
		const char *line_end = memchr(at, '\n', (size_t)(end - at));
		next = line_end ? line_end + 1 : end;
		if (!line_end)
			line_end = end;
		if (line_end > at && line_end[-1] == '\r')
			line_end--;
		bool continued = line_end > at && line_end[-1] == '\\';
		number++;
		if (used == 0)
			p->line = number;   /* a statement is blamed on its first line */
		if (!append(p, statement, &used, at, line_end - continued))
			return false;
		if (continued)
			continue;
		used = 0;
		if (!parse_statement(p, statement))
			return false;
	}
	return used == 0 || refuse(p, "expected another line after the backslash");
}

/* ---- completion ---- */

static void fill_identity(struct sim_topology *topology)
{
	for (uint32_t g = 0; g < topology->n_gpus; g++) {
		struct sim_gpu *gpu = &topology->gpus[g];
		char seed[2 * SIM_NAME_LEN + 32], digest[SIM_UUID_LEN];
		snprintf(seed, sizeof seed, "%s/%s/gpu/%u", topology->name, topology->node_name, g);
		if (!*gpu->uuid)
			sim_format_seeded_uuid("GPU-", seed, gpu->uuid);
		if (!*gpu->serial) {
			sim_format_seeded_uuid("", seed, digest);
			snprintf(gpu->serial, sizeof gpu->serial, "16%011llu", strtoull(digest + 24, NULL, 16) % 100000000000ull);
		}
	}
}

static bool check_whole(struct parser *p)
{
	struct sim_topology *t = p->topology;
	p->line = 0;
	if (!*t->name)
		return refuse(p, "expected a topology statement with name=...");
	if (t->n_gpus == 0)
		return refuse(p, "expected at least one gpu statement");
	for (uint32_t a = 0; a < t->n_gpus; a++) {
		if (!t->numa_nodes[t->gpus[a].numa_node % SIM_MAX_NUMA_NODES].present || t->gpus[a].numa_node >= SIM_MAX_NUMA_NODES)
			return refuse(p, "gpu %u: expected a numa statement for its NUMA node %u", a, t->gpus[a].numa_node);
		for (uint32_t b = 0; b < a; b++) {
			if (strcmp(t->gpus[a].uuid, t->gpus[b].uuid) == 0)
				return refuse(p, "gpu %u: expected a UUID of its own, found that of gpu %u", a, b);
			if (memcmp(&t->gpus[a].pci, &t->gpus[b].pci, sizeof t->gpus[a].pci) == 0)
				return refuse(p, "gpu %u: expected a PCI address of its own, found that of gpu %u", a, b);
		}
	}
	return true;
}

bool sim_topology_parse(const char *text, size_t length, const char *file, const char *node_name, struct sim_topology *out,
			struct sim_topology_error *error)
{
	struct parser *p = calloc(1, sizeof *p);
	if (!p) {
		snprintf(error->message, sizeof error->message, "%s: out of memory", file);
		return false;
	}
	memset(out, 0, sizeof *out);
	memset(error, 0, sizeof *error);
	p->file = file;
	p->topology = out;
	p->error = error;
	out->cuda_version = 13000;
	sim_topology_set_driver(out, "580.159.03");
	bool good = parse_lines(p, text, length);
	if (good) {
		if (node_name && *node_name)
			snprintf(out->node_name, sizeof out->node_name, "%s", node_name);
		fill_identity(out);
		good = check_whole(p);
	}
	free(p);
	return good;
}

bool sim_topology_load(const char *path, const char *node_name, struct sim_topology *out, struct sim_topology_error *error)
{
	FILE *file = fopen(path, "re");
	if (!file) {
		snprintf(error->message, sizeof error->message, "%s: %s", path, strerror(errno));
		return false;
	}
	char *text = NULL;
	size_t room = 0;
	ssize_t length = getdelim(&text, &room, '\0', file);
	bool failed = length < 0 && ferror(file);
	bool good = false;
	fclose(file);
	if (failed)
		snprintf(error->message, sizeof error->message, "%s: cannot be read", path);
	else if (length < 0)
		good = sim_topology_parse("", 0, path, node_name, out, error);
	else
		good = sim_topology_parse(text, (size_t)length, path, node_name, out, error);
	free(text);
	return good;
}
