/* SPDX-License-Identifier: Apache-2.0 */
/* A thread is not cancelled inside a CUDA call: if it waits there for its ceiling, the call returns first, with all counts correct.
 *
 * Argument: the build directory. Needs its simulated driver. */
#include <fcntl.h>
#include <pthread.h>
#include <stdbool.h>
#include <sys/mman.h>
#include <unistd.h>

#include "cuda_abi.h"
#include "tests/unpacked.h"

#define PATIENCE_SECONDS 60
#define KERNEL_US 2000
#define CEILING_PERCENT 4

#define CALLS(X)                                                                                           \
	X(cuInit) X(cuDevicePrimaryCtxRetain) X(cuCtxSetCurrent) X(cuModuleLoadData) X(cuModuleGetFunction) \
	X(cuLaunchKernel) X(cuCtxSynchronize)

UNPACKED_CALLS(CALLS);

static CUcontext context;
static CUfunction function;
static _Atomic unsigned launches;
static _Atomic bool is_inside, ended_inside;

static void launch(void)
{
	uint64_t length = KERNEL_US;
	void *params[] = { &length };

	CHECK(cu.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, NULL, params, NULL) == CUDA_SUCCESS);
}

static void note_end(void *unused)
{
	(void)unused;
	ended_inside = is_inside;
}

static void *keep_launching(void *unused)
{
	CHECK(cu.cuCtxSetCurrent(context) == CUDA_SUCCESS);
	pthread_cleanup_push(note_end, NULL);
	for (;;) {
		pthread_testcancel();
		is_inside = true;
		launch();
		is_inside = false;
		launches++;
	}
	pthread_cleanup_pop(0);
	return unused;
}

/* The container's region, as the agent sees it: how many of this process's threads wait to launch. */
static _Atomic uint32_t *waiting_threads(const char *root)
{
	char path[4096];

	snprintf(path, sizeof(path), "%s/run/aliquot/region", root);
	int file = open(path, O_RDWR);
	char *base = mmap(NULL, AQ_REGION_BYTES, PROT_READ, MAP_SHARED, file, 0);
	CHECK(base != MAP_FAILED);
	close(file);
	return &((struct aq_region_slot *)(void *)(base + AQ_REGION_SLOT_OFFSET))->device[0].waiting;
}

static void load(void)
{
	static const char image[] =
		".version 7.0\n.target sm_70\n.address_size 64\n.visible .entry aliquot_spin(.param .u64 us) { ret; }\n";
	CUmodule module;

	CHECK(cu.cuInit(0) == CUDA_SUCCESS);
	CHECK(cu.cuDevicePrimaryCtxRetain(&context, 0) == CUDA_SUCCESS);
	CHECK(cu.cuCtxSetCurrent(context) == CUDA_SUCCESS);
	CHECK(cu.cuModuleLoadData(&module, image) == CUDA_SUCCESS);
	CHECK(cu.cuModuleGetFunction(&function, module, "aliquot_spin") == CUDA_SUCCESS);
}

int main(int argc, char **argv)
{
	static struct support_page page;
	pthread_t thread;
	void *result;

	CHECK(argc == 2);
	alarm(PATIENCE_SECONDS);
	const char *root = unpacked_container(argv[1], 1024 * MIB, &page);
	page.device[0].sm_percent = CEILING_PERCENT;
	page.header.checksum = support_checksum(&page);
	unpacked_write_limits(&page);
	UNPACKED_FIND(CALLS);
	load();
	_Atomic uint32_t *waiting = waiting_threads(root);
	CHECK(pthread_create(&thread, NULL, keep_launching, NULL) == 0);
	while (launches < 8 || !*waiting)
		usleep(100);
	CHECK(pthread_cancel(thread) == 0);
	CHECK(pthread_join(thread, &result) == 0);
	CHECK(result == PTHREAD_CANCELED);
	CHECK(!ended_inside);
	CHECK(*waiting == 0);
	CHECK(cu.cuCtxSynchronize() == CUDA_SUCCESS);
	launch(); /* and no lock is held */
	unpacked_remove();
	return 0;
}
