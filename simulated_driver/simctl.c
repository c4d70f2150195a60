/* SPDX-License-Identifier: Apache-2.0 */
/* simctl.c - aliquot-sim: makes a simulated node, shows it, and breaks it on purpose.
 *
 * It works on the node's state file directly, as the drivers do, so its changes take effect in running programs. Exit status: 0 done, 1
 * failed, 2 wrong usage. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "simulated_driver/profiles.h"
#include "simulated_driver/state.h"

enum { EXIT_DONE = 0, EXIT_FAILED = 1, EXIT_USAGE = 2 };

static const char usage_text[] =
	"usage: aliquot-sim COMMAND ...\n"
	"\n"
	"  init PROFILE|FILE --dir DIR [--node NAME] [--driver VERSION]\n"
	"      Make a simulated node in DIR: the file `topology` (readable text) and the file `state` (shared by all programs).\n"
	"      PROFILE is one of `aliquot-sim profiles`; FILE is a topology of your own. NAME seeds UUIDs and serial numbers.\n"
	"      Programs find the node by ALIQUOT_SIM_DIR=DIR. A node that exists is replaced; programs that run on it keep the old one.\n"
	"\n"
	"  show [--dir DIR]\n"
	"      GPUs, memory, MIG instances, processes and faults.\n"
	"\n"
	"  profiles\n"
	"      The built-in topologies.\n"
	"\n"
	"  inject FAULT [--dir DIR] [--gpu MINOR|UUID]\n"
	"      xid NUMBER                     report an XID (with a MIG device's UUID: as of that device)\n"
	"      lost                           the GPU falls off the bus, with XID 79\n"
	"      recover                        a lost GPU is back\n"
	"      hang MILLISECONDS              every call that reaches the GPU takes this much longer; 0 ends it\n"
	"      ecc corrected|uncorrected [COUNT]   memory errors; uncorrected ones end CUDA contexts and report XID 48\n"
	"      mismatch on|off                driver library and kernel module differ in version (whole node)\n"
	"      no-driver on|off               no kernel module is loaded (whole node)\n"
	"      living-samples on|off          utilisation names no ended process (whole node)\n"
	"      clear                          end all faults, as a reset of the GPU does, or of all GPUs without --gpu;\n"
	"                                     a MIG mode that waits for an idle GPU takes effect\n"
	"\n"
	"Without --dir, DIR is ALIQUOT_SIM_DIR. Exit status: 0 done, 1 failed, 2 wrong usage.\n";

__attribute__((format(printf, 1, 2))) static int fail(const char *format, ...)
{
	va_list args;
	va_start(args, format);
	fputs("aliquot-sim: ", stderr);
	vfprintf(stderr, format, args);
	fputc('\n', stderr);
	va_end(args);
	return EXIT_FAILED;
}

__attribute__((format(printf, 1, 2))) static int misuse(const char *format, ...)
{
	va_list args;
	va_start(args, format);
	fputs("aliquot-sim: ", stderr);
	vfprintf(stderr, format, args);
	fputs("; see aliquot-sim --help\n", stderr);
	va_end(args);
	return EXIT_USAGE;
}

/* ---- arguments ---- */

struct options {
	const char *dir, *node, *driver, *gpu;
	const char *words[4];   /* what is not an option, after the command */
	int n_words;
};

static const char **option_slot(struct options *options, const char *name)
{
	if (strcmp(name, "--dir") == 0)
		return &options->dir;
	if (strcmp(name, "--node") == 0)
		return &options->node;
	if (strcmp(name, "--driver") == 0)
		return &options->driver;
	return strcmp(name, "--gpu") == 0 ? &options->gpu : NULL;
}

static int parse_options(int argc, char **argv, struct options *options)
{
	for (int i = 0; i < argc; i++) {
		if (strncmp(argv[i], "--", 2) != 0) {
			if (options->n_words == (int)(sizeof options->words / sizeof *options->words))
				return misuse("unexpected \"%s\"", argv[i]);
			options->words[options->n_words++] = argv[i];
			continue;
		}
		const char **slot = option_slot(options, argv[i]);
		if (!slot)
			return misuse("unknown option %s", argv[i]);
		if (i + 1 == argc)
			return misuse("%s needs a value", argv[i]);
		*slot = argv[++i];
	}
	return EXIT_DONE;
}

static bool parse_number(const char *text, unsigned long limit, unsigned long *out)
{
	char *end;
	errno = 0;
	*out = strtoul(text, &end, 10);
	return *text >= '0' && *text <= '9' && *end == '\0' && errno == 0 && *out <= limit;
}

static struct sim_state *open_node(const struct options *options)
{
	char error[SIM_ERROR_LEN];
	struct sim_state *state = options->dir ? sim_state_open(options->dir, error) : sim_state_map(error);
	if (!state)
		fail("%s", error);
	return state;
}

/* ---- init ---- */

static char *read_file(const char *path)
{
	FILE *file = fopen(path, "re");
	char *text = NULL;
	size_t size = 0;
	if (!file)
		return NULL;
	ssize_t got = getdelim(&text, &size, '\0', file);
	bool empty = got < 0 && !ferror(file);
	fclose(file);
	if (got >= 0)
		return text;
	free(text);     /* after an immediate end of file it holds nothing, not even a terminator */
	return empty ? strdup("") : NULL;
}

static char *profile_text(const char *name)
{
	for (const struct sim_profile *profile = sim_profiles; profile->name; profile++)
		if (strcmp(profile->name, name) == 0)
			return strdup(profile->text);
	return read_file(name);
}

/* Later statements win, so settings of the command line are added at the end, and the node's `topology` is complete. */
static char *with_overrides(const char *text, const struct options *options, const struct sim_topology *topology)
{
	char *out = NULL;
	size_t size = 0;
	FILE *stream = open_memstream(&out, &size);
	if (!stream)
		return NULL;
	fputs(text, stream);
	if (options->node || options->driver)
		fprintf(stream, "\n# Set by aliquot-sim init.\n");
	if (options->node)
		fprintf(stream, "topology name=\"%s\" node=\"%s\"\n", topology->name, options->node);
	if (options->driver)
		fprintf(stream, "driver   version=%s\n", options->driver);
	return fclose(stream) == 0 ? out : NULL;
}

static bool write_topology(const char *dir, const char *text)
{
	char path[PATH_MAX], temporary[PATH_MAX + 8];
	if (snprintf(path, sizeof path, "%s/topology", dir) >= (int)sizeof path)
		return false;
	snprintf(temporary, sizeof temporary, "%s.new", path);
	FILE *file = fopen(temporary, "we");
	if (!file)
		return false;
	bool written = fputs(text, file) >= 0;
	written = fclose(file) == 0 && written;
	return written && rename(temporary, path) == 0;
}

static int init_from_text(const char *text, const struct options *options, struct sim_topology *topology)
{
	struct sim_topology_error wrong;
	char error[SIM_ERROR_LEN], dir[PATH_MAX];
	if (!sim_topology_parse(text, strlen(text), options->words[0], NULL, topology, &wrong))
		return fail("%s", wrong.message);
	if (options->node && (strlen(options->node) >= SIM_NAME_LEN || strchr(options->node, '"') || strchr(options->node, '\n')))
		return misuse("--node: expected at most %d characters without quotes, found \"%s\"", SIM_NAME_LEN - 1, options->node);
	char *complete = with_overrides(text, options, topology);
	if (!complete)
		return fail("no memory for the topology");
	int status = EXIT_DONE;
	if (!sim_topology_parse(complete, strlen(complete), options->words[0], NULL, topology, &wrong))
		status = fail("%s", wrong.message);
	else if (mkdir(options->dir, 0777) != 0 && errno != EEXIST)
		status = fail("%s: cannot make the directory: %s", options->dir, strerror(errno));
	else if (!realpath(options->dir, dir) || !write_topology(dir, complete))
		status = fail("%s/topology: cannot write: %s", options->dir, strerror(errno));
	else if (!sim_state_create(dir, topology, error))
		status = fail("%s", error);
	else
		printf("%s: %u GPUs, %s, driver %s\n", dir, topology->n_gpus, topology->gpus[0].name, topology->driver_version);
	free(complete);
	return status;
}

static int command_init(const struct options *options)
{
	if (options->n_words != 1)
		return misuse("init: expected one PROFILE or FILE");
	if (!options->dir)
		return misuse("init: expected --dir DIR");
	char *text = profile_text(options->words[0]);
	if (!text)
		return fail("%s: neither a profile (see aliquot-sim profiles) nor a readable file: %s", options->words[0], strerror(errno));
	struct sim_topology *topology = calloc(1, sizeof *topology);
	int status = topology ? init_from_text(text, options, topology) : fail("no memory for the topology");
	free(topology);
	free(text);
	return status;
}

/* ---- profiles ---- */

static int command_profiles(const struct options *options)
{
	if (options->n_words)
		return misuse("profiles: unexpected \"%s\"", options->words[0]);
	for (const struct sim_profile *profile = sim_profiles; profile->name; profile++) {
		const char *title = profile->text + strspn(profile->text, "# ");
		printf("%-12s %.*s\n", profile->name, (int)strcspn(title, "\n"), title);
	}
	return EXIT_DONE;
}

/* ---- show ---- */

static unsigned long long mib(uint64_t bytes)
{
	return (unsigned long long)(bytes >> 20);
}

/* Busy share of the last half second of finished buckets. */
static unsigned busy_percent(struct sim_state *state, uint32_t gpu, int mig_device)
{
	uint64_t end_ns = sim_now_ns() / SIM_BUCKET_NS * SIM_BUCKET_NS, window_ns = 5 * SIM_BUCKET_NS;
	return (unsigned)(sim_gpu_busy_ns(state, gpu, mig_device, end_ns - 1, window_ns) * 100 / window_ns);
}

static void print_faults(const struct sim_gpu_state *gpu)
{
	unsigned long long uncorrected = atomic_load(&gpu->ecc_uncorrected_volatile), corrected = atomic_load(&gpu->ecc_corrected_volatile);
	uint32_t newest = atomic_load(&gpu->xid_sequence);
	const char *separator = "";
	if (atomic_load(&gpu->lost)) {
		printf("lost");
		separator = ", ";
	}
	if (atomic_load(&gpu->hang_ms)) {
		printf("%shang %u ms", separator, atomic_load(&gpu->hang_ms));
		separator = ", ";
	}
	if (corrected || uncorrected) {
		printf("%secc %llu corrected %llu uncorrected", separator, corrected, uncorrected);
		separator = ", ";
	}
	if (newest) {
		printf("%slast xid %u", separator, gpu->xids[newest % SIM_XID_RING].xid);
		separator = ", ";
	}
	printf("%s\n", *separator ? "" : "-");
}

static void look_at_mig(struct sim_state *state, uint32_t gpu, struct sim_mig *out)
{
	sim_lock(state);
	sim_mig_snapshot(&state->gpus[gpu].mig, out);
	sim_unlock(state);
}

static uint64_t mig_used_bytes(const struct sim_mig *mig)
{
	uint64_t used = 0;
	for (uint32_t id = 0; id < SIM_MIG_MAX_GPU_INSTANCES; id++)
		if (atomic_load(&mig->gpu_instances[id].present))
			used += atomic_load(&mig->gpu_instances[id].used_bytes);
	return used;
}

static void show_mig_devices(struct sim_state *state, uint32_t index, const struct sim_mig *mig)
{
	const struct sim_gpu *hardware = &state->topology.gpus[index];
	for (uint32_t i = 0; i < SIM_MIG_MAX_DEVICES; i++) {
		const struct sim_compute_instance *ci = &mig->devices[i];
		if (!atomic_load(&ci->present))
			continue;
		const struct sim_gpu_instance *gi = &mig->gpu_instances[ci->gpu_instance_id];
		char name[SIM_NAME_LEN];
		sim_mig_profile_name(hardware, sim_mig_profile_by_id(hardware, gi->profile_id), ci->compute_slices, name, sizeof name);
		printf("    mig %u  %s  %-12s gi %-2u ci %u  slices %u..%u  %llu/%llu MiB  %u%%\n", i, ci->uuid, name, ci->gpu_instance_id,
		       ci->id, gi->placement_start, gi->placement_start + gi->placement_size - 1, mib(atomic_load(&gi->used_bytes)),
		       mib(gi->memory_bytes), busy_percent(state, index, (int)i));
	}
}

static void show_gpu(struct sim_state *state, uint32_t index)
{
	const struct sim_gpu *hardware = &state->topology.gpus[index];
	const struct sim_gpu_state *gpu = &state->gpus[index];
	struct sim_mig mig;
	char address[32];
	look_at_mig(state, index, &mig);
	uint32_t enabled = atomic_load(&mig.enabled), pending = atomic_load(&mig.pending);
	sim_format_pci_address(&hardware->pci, address, sizeof address);
	const char *mode = hardware->mig_family == SIM_MIG_NONE ? "-"
			   : enabled != pending                 ? (pending ? "off (on pending)" : "on (off pending)")
			   : enabled                            ? "on"
								: "off";
	printf("gpu %-2u  %s  %s  %s  numa %u  %llu/%llu MiB  %u%%  mig %s  faults ", index, hardware->uuid, hardware->name, address,
	       hardware->numa_node, mib(atomic_load(&gpu->used_bytes) + mig_used_bytes(&mig)),
	       mib(hardware->memory_bytes - hardware->memory_reserved_bytes), busy_percent(state, index, SIM_MIG_ANY_DEVICE), mode);
	print_faults(gpu);
	show_mig_devices(state, index, &mig);
}

static void show_processes(struct sim_state *state)
{
	struct sim_process process;
	int cursor = 0;
	while (sim_next_process(state, &cursor, &process))
		for (uint32_t gpu = 0; gpu < state->topology.n_gpus; gpu++) {
			const struct sim_slot_gpu *held = &state->slots[process.slot].gpus[gpu];
			int mig_device = atomic_load(&held->mig_device);
			if (atomic_load(&held->contexts) == 0)
				continue;
			printf("pid %-7d gpu %-2u", (int)process.pid, gpu);
			if (mig_device != SIM_WHOLE_GPU)
				printf(" mig %d", mig_device);
			printf("  %llu MiB  %s\n", mib(sim_slot_used_bytes(state, process.slot, gpu)), process.name);
		}
}

static int command_show(const struct options *options)
{
	if (options->n_words)
		return misuse("show: unexpected \"%s\"", options->words[0]);
	struct sim_state *state = open_node(options);
	if (!state)
		return EXIT_FAILED;
	const struct sim_topology *topology = &state->topology;
	sim_reap(state);
	printf("node %s%s%s in %s  driver %s  CUDA %d.%d%s%s\n", topology->name, *topology->node_name ? " " : "", topology->node_name,
	       sim_state_dir(), topology->driver_version, topology->cuda_version / 1000, topology->cuda_version % 1000 / 10,
	       atomic_load(&state->driver_mismatch) ? "  FAULT driver mismatch" : "",
	       atomic_load(&state->settings.driver_absent) ? "  FAULT no driver" : "");
	for (uint32_t gpu = 0; gpu < topology->n_gpus; gpu++)
		show_gpu(state, gpu);
	show_processes(state);
	return EXIT_DONE;
}

/* ---- inject ---- */

struct place {
	uint32_t gpu;
	int mig_device;
};

static bool find_place(struct sim_state *state, const char *name, struct place *out)
{
	unsigned long minor;
	if (parse_number(name, UINT_MAX, &minor)) {
		*out = (struct place){ (uint32_t)minor, SIM_WHOLE_GPU };
		return minor < state->topology.n_gpus;
	}
	for (uint32_t gpu = 0; gpu < state->topology.n_gpus; gpu++) {
		*out = (struct place){ gpu, SIM_WHOLE_GPU };
		if (strcmp(state->topology.gpus[gpu].uuid, name) == 0)
			return true;
		struct sim_mig mig;
		look_at_mig(state, gpu, &mig);
		for (out->mig_device = 0; out->mig_device < SIM_MIG_MAX_DEVICES; out->mig_device++) {
			const struct sim_compute_instance *ci = &mig.devices[out->mig_device];
			if (atomic_load(&ci->present) && strcmp(ci->uuid, name) == 0)
				return true;
		}
	}
	return false;
}

static int inject_xid(struct sim_state *state, const struct place *place, const struct options *options)
{
	unsigned long xid;
	if (options->n_words != 2 || !parse_number(options->words[1], 10000, &xid))
		return misuse("inject xid: expected a number up to 10000");
	sim_fault_xid(state, place->gpu, place->mig_device, (uint32_t)xid);
	return EXIT_DONE;
}

static int inject_lost(struct sim_state *state, const struct place *place, const struct options *options)
{
	if (options->n_words != 1)
		return misuse("inject lost: unexpected \"%s\"", options->words[1]);
	sim_fault_set_lost(state, place->gpu, true);
	return EXIT_DONE;
}

static int inject_recover(struct sim_state *state, const struct place *place, const struct options *options)
{
	if (options->n_words != 1)
		return misuse("inject recover: unexpected \"%s\"", options->words[1]);
	sim_fault_set_lost(state, place->gpu, false);
	return EXIT_DONE;
}

static int inject_hang(struct sim_state *state, const struct place *place, const struct options *options)
{
	unsigned long milliseconds;
	if (options->n_words != 2 || !parse_number(options->words[1], UINT32_MAX, &milliseconds))
		return misuse("inject hang: expected a number of milliseconds");
	sim_fault_set_hang(state, place->gpu, (uint32_t)milliseconds);
	return EXIT_DONE;
}

static int inject_ecc(struct sim_state *state, const struct place *place, const struct options *options)
{
	unsigned long count = 1;
	bool uncorrected = options->n_words >= 2 && strcmp(options->words[1], "uncorrected") == 0;
	if (options->n_words < 2 || (!uncorrected && strcmp(options->words[1], "corrected") != 0))
		return misuse("inject ecc: expected corrected or uncorrected");
	if (options->n_words > 3 || (options->n_words == 3 && (!parse_number(options->words[2], UINT32_MAX, &count) || count == 0)))
		return misuse("inject ecc: expected a count above 0");
	if (!state->topology.gpus[place->gpu].ecc_enabled)
		return fail("GPU %u has ecc=off in the topology: it counts no errors", place->gpu);
	sim_fault_ecc(state, place->gpu, uncorrected, count);
	return EXIT_DONE;
}

static int parse_on_off(const struct options *options, bool *on)
{
	*on = options->n_words == 2 && strcmp(options->words[1], "on") == 0;
	if (options->n_words != 2 || (!*on && strcmp(options->words[1], "off") != 0))
		return misuse("inject %s: expected on or off", options->words[0]);
	return EXIT_DONE;
}

static int inject_mismatch(struct sim_state *state, const struct place *place, const struct options *options)
{
	bool on;
	(void)place;
	int status = parse_on_off(options, &on);
	if (status == EXIT_DONE) {
		sim_fault_set_mismatch(state, on);
		sim_ring_bell(state);
	}
	return status;
}

static int inject_no_driver(struct sim_state *state, const struct place *place, const struct options *options)
{
	bool on;
	(void)place;
	int status = parse_on_off(options, &on);
	if (status == EXIT_DONE) {
		atomic_store(&state->settings.driver_absent, on);
		sim_ring_bell(state);
	}
	return status;
}

static int inject_living_samples(struct sim_state *state, const struct place *place, const struct options *options)
{
	bool on;
	(void)place;
	int status = parse_on_off(options, &on);
	if (status == EXIT_DONE)
		atomic_store(&state->settings.living_samples, on);
	return status;
}

static void clear_gpu(struct sim_state *state, uint32_t gpu)
{
	struct sim_mig *mig = &state->gpus[gpu].mig;
	sim_fault_clear(state, gpu);
	sim_lock(state);
	if (atomic_load(&mig->pending) != atomic_load(&mig->enabled) && sim_gpu_contexts(state, gpu, SIM_MIG_ANY_DEVICE) == 0)
		sim_mig_set_mode(mig, atomic_load(&mig->pending));
	sim_unlock(state);
	sim_ring_bell(state);
}

static int inject_clear(struct sim_state *state, const struct place *place, const struct options *options)
{
	if (options->n_words != 1)
		return misuse("inject clear: unexpected \"%s\"", options->words[1]);
	if (place) {
		clear_gpu(state, place->gpu);
		return EXIT_DONE;
	}
	sim_fault_set_mismatch(state, false);
	atomic_store(&state->settings.driver_absent, 0);
	atomic_store(&state->settings.living_samples, 0);
	for (uint32_t gpu = 0; gpu < state->topology.n_gpus; gpu++)
		clear_gpu(state, gpu);
	return EXIT_DONE;
}

enum scope { SCOPE_GPU, SCOPE_NODE, SCOPE_EITHER };

static const struct fault {
	const char *name;
	enum scope scope;
	int (*inject)(struct sim_state *state, const struct place *place, const struct options *options);
} faults[] = {
	{ "xid", SCOPE_GPU, inject_xid },
	{ "lost", SCOPE_GPU, inject_lost },
	{ "recover", SCOPE_GPU, inject_recover },
	{ "hang", SCOPE_GPU, inject_hang },
	{ "ecc", SCOPE_GPU, inject_ecc },
	{ "mismatch", SCOPE_NODE, inject_mismatch },
	{ "no-driver", SCOPE_NODE, inject_no_driver },
	{ "living-samples", SCOPE_NODE, inject_living_samples },
	{ "clear", SCOPE_EITHER, inject_clear },
};

static int command_inject(const struct options *options)
{
	const struct fault *fault = NULL;
	struct place place;
	for (size_t i = 0; options->n_words && i < sizeof faults / sizeof *faults; i++)
		if (strcmp(faults[i].name, options->words[0]) == 0)
			fault = &faults[i];
	if (!fault)
		return misuse("inject: expected a fault, found %s", options->n_words ? options->words[0] : "nothing");
	if (fault->scope == SCOPE_GPU && !options->gpu)
		return misuse("inject %s: expected --gpu MINOR|UUID", fault->name);
	if (fault->scope == SCOPE_NODE && options->gpu)
		return misuse("inject %s concerns the whole node: no --gpu", fault->name);
	struct sim_state *state = open_node(options);
	if (!state)
		return EXIT_FAILED;
	if (options->gpu && !find_place(state, options->gpu, &place))
		return fail("--gpu %s: no such GPU or MIG device on this node (see aliquot-sim show)", options->gpu);
	return fault->inject(state, options->gpu ? &place : NULL, options);
}

/* ---- main ---- */

int main(int argc, char **argv)
{
	static const struct {
		const char *name;
		int (*run)(const struct options *options);
	} commands[] = {
		{ "init", command_init }, { "show", command_show }, { "profiles", command_profiles }, { "inject", command_inject }
	};
	struct options options = { 0 };
	for (int i = 1; i < argc; i++)
		if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0 || (i == 1 && strcmp(argv[i], "help") == 0)) {
			fputs(usage_text, stdout);
			return EXIT_DONE;
		}
	if (argc < 2)
		return misuse("expected a command");
	for (size_t i = 0; i < sizeof commands / sizeof *commands; i++)
		if (strcmp(commands[i].name, argv[1]) == 0) {
			int status = parse_options(argc - 2, argv + 2, &options);
			return status == EXIT_DONE ? commands[i].run(&options) : status;
		}
	return misuse("unknown command \"%s\"", argv[1]);
}
