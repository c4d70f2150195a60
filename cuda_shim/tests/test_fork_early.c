/* SPDX-License-Identifier: Apache-2.0 */
/* A program may fork at any moment, also while another of its threads is the first to look something up. Its children have to find all they
 * look up, too. Such a moment comes once in a process, so there are many processes.
 *
 * Argument: the build directory. Needs its simulated driver. Both fronts, without dlsym: libc's own lock of the loader outlives a fork. */
#include <dlfcn.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cuda_abi.h"
#include "nvml_abi.h"
#include "tests/unpacked.h"

#define ROUNDS 150
#define CHILDREN 6
#define PATIENCE_SECONDS 10 /* of a child, for work that takes less than a millisecond */
#define DELAYS 400          /* iterations of an empty loop */
#define SLOW_US 50000       /* of a fork, so that a lookup has time to overtake it */

static __typeof__(&cuGetProcAddress_v2) get_address;
static nvmlReturn_t (*get_memory)(nvmlDevice_t, nvmlMemory_t *);
static _Atomic bool begun, found;
static bool is_slow, is_overtaken;

static void look_up_cuda(void)
{
	CUdriverProcAddressQueryResult status;
	void *address = NULL;

	CHECK(get_address("cuMemAlloc", &address, 12000, CU_GET_PROC_ADDRESS_DEFAULT, &status) == CUDA_SUCCESS && address);
}

static void ask_nvml(void)
{
	nvmlMemory_t memory;

	CHECK(get_memory(NULL, &memory) != NVML_SUCCESS); /* it was not initialised */
}

static void *look_up_first(void *call)
{
	while (!begun)
		;
	((void (*)(void))call)();
	found = true;
	return NULL;
}

/* A child that waits for a lock for ever ends by SIGALRM, one that crashes by another signal. */
static void expect_success(pid_t child)
{
	int status;

	CHECK(waitpid(child, &status, 0) == child);
	if (WIFSIGNALED(status))
		fprintf(stderr, "a child ended by signal %d\n", WTERMSIG(status));
	CHECK(status == 0);
}

/* In a separate process: children that are forked around the moment of a lookup in another thread. */
static void fork_around(void (*call)(void), unsigned delay)
{
	pid_t children[CHILDREN];
	pthread_t thread;

	CHECK(pthread_create(&thread, NULL, look_up_first, (void *)call) == 0);
	CHECK(pthread_detach(thread) == 0); /* or ThreadSanitizer misses it in the children */
	usleep(200); /* it is there, and waits */
	begun = true;
	for (volatile unsigned i = 0; i < delay; i++)
		;
	for (unsigned i = 0; i < CHILDREN; i++) {
		children[i] = fork();
		CHECK(children[i] >= 0);
		if (!children[i]) {
			alarm(PATIENCE_SECONDS);
			call();
			_exit(0);
		}
	}
	while (!found)
		usleep(100);
	for (unsigned i = 0; i < CHILDREN; i++)
		expect_success(children[i]);
	_exit(0);
}

/* It was registered before the shim was loaded, so it runs after the shim's own. */
static void linger(void)
{
	if (!is_slow)
		return;
	begun = true;
	usleep(SLOW_US);
	is_overtaken = found;
}

/* In a separate process: a lookup that begins while another thread forks. Halfway through, the child would get the lookup's locks. */
static void look_up_during_fork(void (*call)(void))
{
	pthread_t thread;
	pid_t child;

	CHECK(pthread_create(&thread, NULL, look_up_first, (void *)call) == 0);
	is_slow = true;
	child = fork();
	CHECK(child >= 0);
	if (!child)
		_exit(0);
	CHECK(!is_overtaken);
	expect_success(child);
	CHECK(pthread_join(thread, NULL) == 0);
	CHECK(found);
	_exit(0);
}

static void expect_no_overtaking(void (*call)(void))
{
	pid_t process = fork();

	CHECK(process >= 0);
	if (!process)
		look_up_during_fork(call);
	expect_success(process);
}

static void try_often(void (*call)(void))
{
	for (unsigned i = 0; i < ROUNDS; i++) {
		pid_t process = fork();

		CHECK(process >= 0);
		if (!process)
			fork_around(call, i * DELAYS);
		expect_success(process);
	}
}

/* The simulated driver's first steps are under a lock of its own. */
static void warm_up_driver(void)
{
	__typeof__(&cuDriverGetVersion) get_version = (__typeof__(get_version))dlsym(unpacked_driver(), "cuDriverGetVersion");
	int version;

	CHECK(get_version && get_version(&version) == CUDA_SUCCESS);
}

int main(int argc, char **argv)
{
	static struct support_page page;

	CHECK(argc == 2);
	CHECK(pthread_atfork(linger, NULL, NULL) == 0);
	unpacked_container(argv[1], 1024 * MIB, &page);
	get_address = (__typeof__(get_address))dlsym(unpacked_front(), "cuGetProcAddress_v2");
	get_memory = (__typeof__(get_memory))dlsym(unpacked_nvml_front(), "nvmlDeviceGetMemoryInfo");
	CHECK(get_address && get_memory);
	warm_up_driver();
	expect_no_overtaking(look_up_cuda);
	expect_no_overtaking(ask_nvml);
	try_often(look_up_cuda);
	try_often(ask_nvml);
	unpacked_remove();
	return 0;
}
