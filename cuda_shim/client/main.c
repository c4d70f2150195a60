/* SPDX-License-Identifier: Apache-2.0 */
/* aliquot-cuda-client: a CUDA program that does what its arguments say, and prints one JSON object per line on stdout.
 *
 * It represents the applications that run with a share: the demo, the tests and the benchmarks start it in containers. It does not know
 * Aliquot and finds the driver as any application does.
 */
#include <getopt.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "client/driver.h"
#include "client/holdings.h"
#include "client/work.h"

#define MIB ((size_t)1 << 20)
#define HOLDINGS_MAX 65536
#define BENCH_ROUNDS 31
#define BENCH_ROUND_NS 50e6
#define IN_FLIGHT_US 50000 /* work between two waits by default, so that a second of work ends about on time */

struct options {
	const char *route;
	const char *kind;
	int device;
	size_t step_mib;
	size_t mib;
	double seconds;
	struct work work;
	unsigned long sync_every; /* submissions between two waits; 0 = by IN_FLIGHT_US */
	bool hold;
};

static struct holding holdings[HOLDINGS_MAX];
static size_t holding_count;

static const char usage_text[] =
	"usage: aliquot-cuda-client COMMAND [options]\n"
	"  info                          the devices and their memory, as the driver shows them\n"
	"  fill  [--kind K] [--step MiB] [--hold]   allocate until refused, down to the smallest amount\n"
	"  hold  --mib N                 allocate N MiB and stay\n"
	"  work  --seconds S --kernel-us N [--mib N] [--launch kernel|ex|cooperative|graph|burn] [--blocks N] [--sync-every N]\n"
	"        [--own-stream]\n"
	"                                keep the device busy; one line of progress per second\n"
	"  bench alloc|launch [--own-stream]|meminfo|init   nanoseconds per call, the median of rounds\n"
	"  repl                          commands from stdin: alloc KIND BYTES | free KIND ID | info | launch US COUNT | sync | quit\n"
	"options: --device N   --via ROUTE\n";

static int usage(void)
{
	fprintf(stderr, "%s  kinds: %s\n  routes: %s\n", usage_text, kind_names, driver_routes);
	return 2;
}

__attribute__((format(printf, 1, 2))) static void print_event(const char *format, ...)
{
	va_list arguments;
	va_start(arguments, format);
	vprintf(format, arguments);
	va_end(arguments);
	putchar('\n');
	fflush(stdout);
}

static int fail(const char *call, CUresult result)
{
	print_event("{\"event\":\"error\",\"call\":\"%s\",\"result\":%d,\"result_name\":\"%s\"}", call, (int)result, driver_error(result));
	return 1;
}

static int64_t now_ns(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000000000ll + t.tv_nsec;
}

static CUresult use_device(int ordinal)
{
	CUcontext context;
	CUresult result = cu.cuDeviceGet(&holdings_device, ordinal);
	if (result == CUDA_SUCCESS)
		result = cu.cuDevicePrimaryCtxRetain(&context, holdings_device);
	return result == CUDA_SUCCESS ? cu.cuCtxSetCurrent(context) : result;
}

static void stay(void)
{
	for (;;)
		pause();
}

/* ---- info -------------------------------------------------------------------------------------------------------- */

static void format_uuid(const CUuuid *uuid, char text[37])
{
	const unsigned char *b = (const unsigned char *)uuid->bytes;
	snprintf(text, 37, "%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", b[0], b[1], b[2], b[3], b[4], b[5], b[6],
		 b[7], b[8], b[9], b[10], b[11], b[12], b[13], b[14], b[15]);
}

static CUresult say_device(int ordinal)
{
	CUdevice device;
	CUuuid uuid;
	char name[128], text[37];
	size_t device_total = 0, free_bytes = 0, total = 0;
	CUresult result = use_device(ordinal);
	if (result == CUDA_SUCCESS)
		result = cu.cuDeviceGet(&device, ordinal);
	if (result == CUDA_SUCCESS)
		result = cu.cuDeviceGetName(name, sizeof name, device);
	if (result == CUDA_SUCCESS)
		result = cu.cuDeviceGetUuid_v2(&uuid, device);
	if (result == CUDA_SUCCESS)
		result = cu.cuDeviceTotalMem_v2(&device_total, device);
	if (result == CUDA_SUCCESS)
		result = cu.cuMemGetInfo_v2(&free_bytes, &total);
	if (result != CUDA_SUCCESS)
		return result;
	format_uuid(&uuid, text);
	print_event("{\"event\":\"device\",\"ordinal\":%d,\"name\":\"%s\",\"uuid\":\"%s\",\"device_total_bytes\":%zu,"
		    "\"total_bytes\":%zu,\"free_bytes\":%zu}",
		    ordinal, name, text, device_total, total, free_bytes);
	return CUDA_SUCCESS;
}

static int command_info(void)
{
	int count = 0;
	CUresult result = cu.cuDeviceGetCount(&count);
	if (result != CUDA_SUCCESS)
		return fail("cuDeviceGetCount", result);
	print_event("{\"event\":\"info\",\"pid\":%d,\"devices\":%d}", (int)getpid(), count);
	for (int ordinal = 0; ordinal < count; ordinal++) {
		result = say_device(ordinal);
		if (result != CUDA_SUCCESS)
			return fail("info", result);
	}
	return 0;
}

/* ---- fill and hold ----------------------------------------------------------------------------------------------- */

static CUresult take(const struct kind *kind, size_t bytes)
{
	if (holding_count == HOLDINGS_MAX)
		return CUDA_ERROR_UNKNOWN;
	struct holding *holding = &holdings[holding_count];
	holding->bytes = bytes;
	CUresult result = kind->take(holding, bytes);
	holding_count += result == CUDA_SUCCESS;
	return result;
}

/* Take ever smaller amounts until the smallest is refused too: what is held then is the limit, to the granule. */
static int command_fill(const struct options *options)
{
	const struct kind *kind = kind_find(options->kind);
	if (!kind)
		return usage();
	size_t held = 0, first_refused = 0, last_refused = 0;
	bool one_size = strcmp(kind->name, "ctx") == 0; /* a context: the requested amount has no meaning */
	CUresult refusal = CUDA_SUCCESS;
	for (size_t step = options->step_mib * MIB; step >= kind->granule_bytes; step /= 2) {
		size_t bytes = step / kind->granule_bytes * kind->granule_bytes;
		CUresult result;
		while ((result = take(kind, bytes)) == CUDA_SUCCESS)
			held += one_size ? 0 : bytes;
		if (result != CUDA_ERROR_OUT_OF_MEMORY)
			return fail(kind->name, result);
		refusal = result;
		first_refused = first_refused ? first_refused : bytes;
		last_refused = bytes;
		if (one_size)
			break;
	}
	size_t free_bytes = 0, total = 0;
	CUresult result = cu.cuMemGetInfo_v2(&free_bytes, &total);
	if (result != CUDA_SUCCESS)
		return fail("cuMemGetInfo", result);
	print_event("{\"event\":\"fill\",\"kind\":\"%s\",\"held_bytes\":%zu,\"blocks\":%zu,\"first_refused_bytes\":%zu,"
		    "\"smallest_refused_bytes\":%zu,\"result\":%d,\"result_name\":\"%s\",\"free_bytes\":%zu,\"total_bytes\":%zu}",
		    kind->name, held, holding_count, first_refused, last_refused, (int)refusal, driver_error(refusal), free_bytes, total);
	if (options->hold)
		stay();
	return 0;
}

static int command_hold(const struct options *options)
{
	CUresult result = options->mib ? take(kind_find("alloc"), options->mib * MIB) : CUDA_SUCCESS;
	if (result != CUDA_SUCCESS)
		return fail("cuMemAlloc", result);
	print_event("{\"event\":\"holding\",\"pid\":%d,\"bytes\":%zu}", (int)getpid(), options->mib * MIB);
	stay();
	return 0;
}

/* ---- work -------------------------------------------------------------------------------------------------------- */

static int command_work(const struct options *options)
{
	const struct work *work = &options->work;
	CUresult result = options->mib ? take(kind_find("alloc"), options->mib * MIB) : CUDA_SUCCESS;
	if (result == CUDA_SUCCESS)
		result = work_prepare(work);
	if (result != CUDA_SUCCESS)
		return fail("prepare", result);
	uint64_t submission_us = work->kernel_us * work_kernels(work->launch);
	unsigned long sync_every = options->sync_every ? options->sync_every : 1 + IN_FLIGHT_US / (submission_us + 1);
	int64_t start = now_ns(), reported = start, end = start + (int64_t)(options->seconds * 1e9);
	uint64_t kernels = 0, reported_kernels = 0;
	for (int64_t now = start; now < end; now = now_ns()) {
		for (unsigned long i = 0; i < sync_every && result == CUDA_SUCCESS && now_ns() < end; i++) {
			result = work_submit(work);
			kernels += work_kernels(work->launch);
		}
		if (result == CUDA_SUCCESS)
			result = cu.cuCtxSynchronize();
		if (result != CUDA_SUCCESS)
			return fail("cuLaunchKernel", result);
		if (now - reported >= 1000000000ll) {
			print_event("{\"event\":\"progress\",\"seconds\":%.3f,\"kernels\":%llu,\"gpu_seconds\":%.6f}",
				    (double)(now - start) / 1e9, (unsigned long long)(kernels - reported_kernels),
				    (double)((kernels - reported_kernels) * work->kernel_us) / 1e6);
			reported = now;
			reported_kernels = kernels;
		}
	}
	double wall = (double)(now_ns() - start) / 1e9;
	print_event("{\"event\":\"work\",\"seconds\":%.3f,\"kernels\":%llu,\"share\":%.5f}", wall, (unsigned long long)kernels,
		    (double)(kernels * work->kernel_us) / 1e6 / wall);
	return 0;
}

/* ---- bench ------------------------------------------------------------------------------------------------------- */

static CUresult bench_alloc(void)
{
	CUdeviceptr pointer;
	CUresult result = cu.cuMemAlloc_v2(&pointer, 4096);
	return result == CUDA_SUCCESS ? cu.cuMemFree_v2(pointer) : result;
}

static CUresult bench_meminfo(void)
{
	size_t free_bytes, total;
	return cu.cuMemGetInfo_v2(&free_bytes, &total);
}

static struct work nothing = { .launch = WORK_KERNEL, .kernel_us = 0, .blocks = 1 };

static CUresult bench_launch(void)
{
	return work_submit(&nothing);
}

static int by_value(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;
	return (x > y) - (x < y);
}

/* Make the call so often, and wait for what it started. Out: nanoseconds per call, without the wait. */
static CUresult time_calls(CUresult (*call)(void), long calls, double *ns_per_call)
{
	int64_t start = now_ns();
	for (long i = 0; i < calls; i++) {
		CUresult result = call();
		if (result != CUDA_SUCCESS)
			return result;
	}
	*ns_per_call = (double)(now_ns() - start) / (double)calls;
	return cu.cuCtxSynchronize();
}

/* At most `calls` in a round: fewer where they are so slow that a round would take longer than BENCH_ROUND_NS. */
static int bench_calls(const char *name, CUresult (*call)(void), long calls)
{
	double rounds[BENCH_ROUNDS], first = 0;
	CUresult result = time_calls(call, calls / 100, &first);
	if (result == CUDA_SUCCESS && first * (double)calls > BENCH_ROUND_NS)
		calls = 1 + (long)(BENCH_ROUND_NS / first);
	for (int round = 0; round < BENCH_ROUNDS && result == CUDA_SUCCESS; round++)
		result = time_calls(call, calls, &rounds[round]);
	if (result != CUDA_SUCCESS)
		return fail(name, result);
	qsort(rounds, BENCH_ROUNDS, sizeof *rounds, by_value);
	print_event("{\"event\":\"bench\",\"what\":\"%s\",\"ns_per_call\":%.2f,\"best_ns\":%.2f}", name, rounds[BENCH_ROUNDS / 2],
		    rounds[0]);
	return 0;
}

/* `--mib` MiB in 4 KiB blocks stay allocated meanwhile, for costs that grow with the number of allocations. */
static int command_bench(const char *what, const struct options *options)
{
	for (size_t i = 0; i < options->mib * MIB / 4096 && i < HOLDINGS_MAX; i++) {
		CUresult result = take(kind_find("alloc"), 4096);
		if (result != CUDA_SUCCESS)
			return fail("cuMemAlloc", result);
	}
	if (strcmp(what, "alloc") == 0)
		return bench_calls("alloc", bench_alloc, 50000);
	if (strcmp(what, "meminfo") == 0)
		return bench_calls("meminfo", bench_meminfo, 200000);
	if (strcmp(what, "launch") == 0) {
		nothing.own_stream = options->work.own_stream;
		CUresult result = work_prepare(&nothing);
		return result == CUDA_SUCCESS ? bench_calls("launch", bench_launch, 500) : fail("prepare", result);
	}
	return usage();
}

static int bench_init(const struct options *options)
{
	int64_t start = now_ns();
	if (!driver_open(options->route))
		return 1;
	CUresult result = cu.cuInit(0);
	if (result != CUDA_SUCCESS)
		return fail("cuInit", result);
	int64_t initialised = now_ns();
	result = use_device(options->device);
	if (result != CUDA_SUCCESS)
		return fail("context", result);
	print_event("{\"event\":\"bench\",\"what\":\"init\",\"init_ns\":%lld,\"context_ns\":%lld}", (long long)(initialised - start),
		    (long long)(now_ns() - initialised));
	return 0;
}

/* ---- repl -------------------------------------------------------------------------------------------------------- */

static void repl_alloc(const char *kind_name, size_t bytes)
{
	const struct kind *kind = kind_find(kind_name);
	if (!kind) {
		print_event("{\"event\":\"error\",\"call\":\"alloc\",\"reason\":\"kind is one of %s\"}", kind_names);
		return;
	}
	size_t id = holding_count;
	CUresult result = take(kind, bytes);
	print_event("{\"event\":\"alloc\",\"id\":%zu,\"result\":%d,\"result_name\":\"%s\"}", id, (int)result, driver_error(result));
}

static void repl_free(const char *kind_name, size_t id)
{
	const struct kind *kind = kind_find(kind_name);
	if (!kind || id >= holding_count) {
		print_event(
			"{\"event\":\"error\",\"call\":\"free\",\"reason\":\"expected: free KIND ID, with the ID that alloc returned\"}");
		return;
	}
	CUresult result = kind->give_back(&holdings[id]);
	print_event("{\"event\":\"free\",\"id\":%zu,\"result\":%d,\"result_name\":\"%s\"}", id, (int)result, driver_error(result));
}

static void repl_launch(uint64_t kernel_us, unsigned long count)
{
	CUresult result = CUDA_SUCCESS;
	struct work work = { .launch = WORK_KERNEL, .kernel_us = kernel_us, .blocks = 1 };
	static bool prepared;
	if (!prepared)
		result = work_prepare(&work);
	prepared = result == CUDA_SUCCESS;
	for (unsigned long i = 0; i < count && result == CUDA_SUCCESS; i++)
		result = work_submit(&work);
	print_event("{\"event\":\"launch\",\"result\":%d,\"result_name\":\"%s\"}", (int)result, driver_error(result));
}

static int command_repl(const struct options *options)
{
	char line[256], word[32];
	unsigned long long first, second;
	print_event("{\"event\":\"ready\",\"pid\":%d}", (int)getpid());
	while (fgets(line, sizeof line, stdin)) {
		if (sscanf(line, "alloc %31s %llu", word, &first) == 2)
			repl_alloc(word, (size_t)first);
		else if (sscanf(line, "free %31s %llu", word, &first) == 2)
			repl_free(word, (size_t)first);
		else if (sscanf(line, "launch %llu %llu", &first, &second) == 2)
			repl_launch(first, (unsigned long)second);
		else if (strcmp(line, "info\n") == 0)
			say_device(options->device);
		else if (strcmp(line, "sync\n") == 0)
			print_event("{\"event\":\"sync\",\"result\":%d}", (int)cu.cuCtxSynchronize());
		else if (strcmp(line, "quit\n") == 0)
			return 0;
		else
			print_event("{\"event\":\"error\",\"call\":\"repl\",\"reason\":\"unknown command\"}");
	}
	return 0;
}

/* ---- start ------------------------------------------------------------------------------------------------------- */

static bool parse_options(int argc, char **argv, struct options *options)
{
	static const struct option names[] = { { "via", required_argument, 0, 'v' },
					       { "kind", required_argument, 0, 'k' },
					       { "device", required_argument, 0, 'd' },
					       { "step", required_argument, 0, 's' },
					       { "mib", required_argument, 0, 'm' },
					       { "seconds", required_argument, 0, 't' },
					       { "kernel-us", required_argument, 0, 'u' },
					       { "hold", no_argument, 0, 'h' },
					       { "launch", required_argument, 0, 'l' },
					       { "sync-every", required_argument, 0, 'y' },
					       { "blocks", required_argument, 0, 'b' },
					       { "own-stream", no_argument, 0, 'o' },
					       { 0, 0, 0, 0 } };
	int option;
	while ((option = getopt_long(argc, argv, "", names, NULL)) != -1) {
		switch (option) {
		case 'v': options->route = optarg; break;
		case 'k': options->kind = optarg; break;
		case 'd': options->device = atoi(optarg); break;
		case 's': options->step_mib = strtoull(optarg, NULL, 10); break;
		case 'm': options->mib = strtoull(optarg, NULL, 10); break;
		case 't': options->seconds = strtod(optarg, NULL); break;
		case 'u': options->work.kernel_us = strtoull(optarg, NULL, 10); break;
		case 'b': options->work.blocks = (unsigned int)strtoul(optarg, NULL, 10); break;
		case 'h': options->hold = true; break;
		case 'o': options->work.own_stream = true; break;
		case 'y': options->sync_every = strtoul(optarg, NULL, 10); break;
		case 'l':
			if (!work_launch_named(optarg, &options->work.launch))
				return false;
			break;
		default: return false;
		}
	}
	return options->step_mib > 0 && options->work.blocks > 0;
}

static int run(const char *command, const char *argument, const struct options *options)
{
	if (strcmp(command, "info") == 0)
		return command_info();
	CUresult result = use_device(options->device);
	if (result != CUDA_SUCCESS)
		return fail("context", result);
	if (strcmp(command, "fill") == 0)
		return command_fill(options);
	if (strcmp(command, "hold") == 0)
		return command_hold(options);
	if (strcmp(command, "work") == 0)
		return command_work(options);
	if (strcmp(command, "bench") == 0)
		return command_bench(argument, options);
	if (strcmp(command, "repl") == 0)
		return command_repl(options);
	return usage();
}

int main(int argc, char **argv)
{
	struct options options = {
		.route = "dlsym", .kind = "alloc", .step_mib = 256, .seconds = 5, .work = { .kernel_us = 1000, .blocks = 1 }
	};
	if (argc < 2 || !parse_options(argc - 1, argv + 1, &options))
		return usage();
	const char *argument = optind < argc - 1 ? argv[optind + 1] : "";
	if (strcmp(argv[1], "bench") == 0 && strcmp(argument, "init") == 0)
		return bench_init(&options);
	if (!driver_open(options.route))
		return 1;
	CUresult result = cu.cuInit(0);
	if (result != CUDA_SUCCESS)
		return fail("cuInit", result);
	return run(argv[1], argument, &options);
}
