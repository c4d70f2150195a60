/* SPDX-License-Identifier: Apache-2.0 */
/*
 * harness.h - what the C tests of the simulated driver share.
 *
 * Each case runs in its own process on its own node, because cuInit happens once per process and because many cases end processes. The
 * program links the simulated libcuda like an application, and the node's state like aliquot-sim, to look behind it and to inject faults.
 */
#ifndef ALIQUOT_SIM_TESTS_HARNESS_H
#define ALIQUOT_SIM_TESTS_HARNESS_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/types.h>

#include "cuda_abi.h"
#include "simulated_driver/state.h"

#define MIB (UINT64_C(1) << 20)
#define GIB (UINT64_C(1) << 30)

struct test_case {
	const char *name;
	const char *profile;
	void (*run)(void);
};
#define CASE(function, profile) { #function, profile, function }

/* Run all cases; the exit status of the program. argv[1] is the build directory, argv[2] an optional part of a case's name. */
int test_main(int argc, char **argv, const struct test_case *cases, size_t count);

__attribute__((noreturn, format(printf, 3, 4))) void test_fail(const char *file, int line, const char *format, ...);

#define CHECK(condition) \
	do { if (!(condition)) test_fail(__FILE__, __LINE__, "expected %s", #condition); } while (0)
#define CHECK_EQUAL(got, wanted)                                                                             \
	do {                                                                                                 \
		long long got_ = (long long)(got), wanted_ = (long long)(wanted);                            \
		if (got_ != wanted_)                                                                         \
			test_fail(__FILE__, __LINE__, "%s: expected %lld, found %lld", #got, wanted_, got_); \
	} while (0)
#define CHECK_BETWEEN(got, low, high)                                                                                                \
	do {                                                                                                                         \
		double got_ = (double)(got);                                                                                         \
		if (got_ < (double)(low) || got_ > (double)(high))                                                                   \
			test_fail(__FILE__, __LINE__, "%s: expected %g to %g, found %g", #got, (double)(low), (double)(high), got_); \
	} while (0)
#define OK(call) CHECK_EQUAL(call, CUDA_SUCCESS)

/* A context on device `ordinal`, current. */
CUcontext test_context(CUdevice ordinal);
CUfunction test_spin(void);                         /* aliquot_spin in a new module */
CUresult test_launch(CUfunction spin, uint64_t microseconds, CUstream stream);
uint64_t test_free_bytes(void);                     /* cuMemGetInfo */

/* The node's state, mapped by the test itself. */
struct sim_state *test_state(void);
uint64_t test_used(uint32_t gpu);                   /* device memory in use on a whole GPU */

/* Fork before cuInit: the child runs `body` and exits 0. */
pid_t test_spawn(void (*body)(void *), void *argument);
void test_reap(pid_t child, int expected_status);   /* wait; the status as waitpid gives it */
/* Wait, for at most ten seconds, until *word has this value; processes share it when it comes from test_shared. */
void test_await(const _Atomic uint32_t *word, uint32_t value);
void *test_shared(size_t bytes);
/* Open a new file in the directory of the case, which goes with it; `path` receives its name. */
int test_file(char *path, size_t size);
void test_sleep_ms(unsigned ms);
double test_seconds(void);

/* Everything slows down under a sanitizer; timing bounds are stretched by this. */
extern const double test_slack;

#endif
