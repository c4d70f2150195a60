/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "simulated_driver/tests/harness.h"

#include <dirent.h>
#include <errno.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
const double test_slack = 4;
#else
const double test_slack = 1;
#endif

#define CASE_SECONDS 120

void test_fail(const char *file, int line, const char *format, ...)
{
	va_list args;
	va_start(args, format);
	fprintf(stderr, "%s:%d: ", strrchr(file, '/') ? strrchr(file, '/') + 1 : file, line);
	vfprintf(stderr, format, args);
	fputc('\n', stderr);
	va_end(args);
	_exit(1);
}

/* ---- CUDA shorthand -------------------------------------------------------------------------------------------------- */

CUcontext test_context(CUdevice ordinal)
{
	CUcontext context;
	OK(cuInit(0));
	OK(cuCtxCreate_v2(&context, 0, ordinal));
	return context;
}

CUfunction test_spin(void)
{
	CUmodule module;
	CUfunction function;
	OK(cuModuleLoadData(&module, ".visible .entry aliquot_spin(.param .u64 microseconds)\n{}\n"));
	OK(cuModuleGetFunction(&function, module, "aliquot_spin"));
	return function;
}

CUresult test_launch(CUfunction spin, uint64_t microseconds, CUstream stream)
{
	void *parameters[] = { &microseconds };
	return cuLaunchKernel(spin, 1, 1, 1, 1, 1, 1, 0, stream, parameters, NULL);
}

uint64_t test_free_bytes(void)
{
	size_t free_bytes, total_bytes;
	OK(cuMemGetInfo_v2(&free_bytes, &total_bytes));
	return free_bytes;
}

/* ---- the node -------------------------------------------------------------------------------------------------------- */

struct sim_state *test_state(void)
{
	char error[SIM_ERROR_LEN];
	struct sim_state *state = sim_state_map(error);
	if (!state)
		test_fail(__FILE__, __LINE__, "%s", error);
	return state;
}

uint64_t test_used(uint32_t gpu)
{
	sim_reap(test_state());
	return atomic_load(&test_state()->gpus[gpu].used_bytes);
}

/* ---- processes ------------------------------------------------------------------------------------------------------- */

pid_t test_spawn(void (*body)(void *), void *argument)
{
	pid_t child = fork();
	CHECK(child >= 0);
	if (child == 0) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);   /* a failed case leaves no process behind */
		body(argument);
		fflush(stdout);
		_exit(0);
	}
	return child;
}

void test_reap(pid_t child, int expected_status)
{
	int status;
	CHECK_EQUAL(waitpid(child, &status, 0), child);
	CHECK_EQUAL(status, expected_status);
}

void *test_shared(size_t bytes)
{
	void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	CHECK(memory != MAP_FAILED);
	return memory;
}

int test_file(char *path, size_t size)
{
	CHECK((size_t)snprintf(path, size, "%s/file.XXXXXX", getenv("ALIQUOT_SIM_DIR")) < size);
	int file = mkstemp(path);
	CHECK(file >= 0);
	return file;
}

void test_sleep_ms(unsigned ms)
{
	struct timespec left = { .tv_sec = ms / 1000, .tv_nsec = (long)(ms % 1000) * 1000000 };
	while (nanosleep(&left, &left) != 0 && errno == EINTR)
		;
}

double test_seconds(void)
{
	struct timespec now;
	clock_gettime(CLOCK_MONOTONIC, &now);
	return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

void test_await(const _Atomic uint32_t *word, uint32_t value)
{
	double deadline = test_seconds() + 10;
	while (atomic_load(word) != value) {
		if (test_seconds() > deadline)
			test_fail(__FILE__, __LINE__, "waited ten seconds for %u, found %u", value, atomic_load(word));
		test_sleep_ms(1);
	}
}

/* ---- running cases --------------------------------------------------------------------------------------------------- */

static void run_command(char *const arguments[])
{
	int status;
	pid_t child = fork();
	CHECK(child >= 0);
	if (child == 0) {
		if (!freopen("/dev/null", "w", stdout))
			_exit(127);
		execv(arguments[0], arguments);
		_exit(127);
	}
	CHECK_EQUAL(waitpid(child, &status, 0), child);
	CHECK_EQUAL(status, 0);
}

static void remove_directory(const char *path)
{
	DIR *directory = opendir(path);
	struct dirent *entry;
	while (directory && (entry = readdir(directory)))
		if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0)
			unlinkat(dirfd(directory), entry->d_name, 0);
	if (directory)
		closedir(directory);
	rmdir(path);
}

static void run_in_child(const struct test_case *test, const char *build, char *directory)
{
	char program[4096];
	snprintf(program, sizeof program, "%s/bin/aliquot-sim", build);
	char *arguments[] = { program, (char *)"init", (char *)(uintptr_t)test->profile, (char *)"--dir", directory, NULL };
	run_command(arguments);
	setenv("ALIQUOT_SIM_DIR", directory, 1);
	unsetenv("CUDA_VISIBLE_DEVICES");
	alarm(CASE_SECONDS);
	test->run();
	exit(0);    /* not _exit: a leak checker looks at what is left */
}

static bool run_case(const struct test_case *test, const char *build)
{
	const char *base = getenv("TMPDIR");
	char directory[4096];
	int status;
	snprintf(directory, sizeof directory, "%s/aliquot-sim-test.XXXXXX", base ? base : "/tmp");
	CHECK(mkdtemp(directory) != NULL);
	pid_t child = fork();
	CHECK(child >= 0);
	if (child == 0)
		run_in_child(test, build, directory);
	CHECK_EQUAL(waitpid(child, &status, 0), child);
	remove_directory(directory);
	if (status != 0)
		fprintf(stderr, "FAILED %s (status 0x%x)\n", test->name, status);
	return status == 0;
}

int test_main(int argc, char **argv, const struct test_case *cases, size_t count)
{
	int failed = 0;
	if (argc < 2) {
		fprintf(stderr, "usage: %s BUILD-DIRECTORY [PART-OF-A-NAME]\n", argv[0]);
		return 2;
	}
	for (size_t i = 0; i < count; i++)
		if (argc < 3 || strstr(cases[i].name, argv[2]))
			failed += !run_case(&cases[i], argv[1]);
	return failed != 0;
}
