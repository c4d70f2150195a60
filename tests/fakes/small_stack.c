/* SPDX-License-Identifier: Apache-2.0 */
/* Calls NVML from a thread with a small stack. Arguments: one of the calls below, and the bytes of the stack. Its exit status is the
 * call's return value; a signal kills it when the stack is too small. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#define ROOM 64u
#define LARGEST_BYTES 64u /* of an entry of any list */
#define UNKNOWN 99

typedef struct nvmlDevice_st *nvmlDevice_t;
int nvmlInit_v2(void);
int nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device);
int nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned int *count, void *processes);
int nvmlDeviceGetProcessUtilization(nvmlDevice_t device, void *samples, unsigned int *count, unsigned long long since_us);

static nvmlDevice_t device;
static char entries[ROOM * LARGEST_BYTES];

static int ask(const char *what)
{
	unsigned int count = ROOM;

	if (!strcmp(what, "processes"))
		return nvmlDeviceGetComputeRunningProcesses_v3(device, &count, entries);
	if (!strcmp(what, "samples"))
		return nvmlDeviceGetProcessUtilization(device, entries, &count, 0);
	return UNKNOWN;
}

static void *answer(void *what)
{
	static int result;

	result = ask(what);
	return &result;
}

int main(int argc, char **argv)
{
	pthread_attr_t attributes;
	pthread_t thread;
	void *result;

	if (argc != 3 || nvmlInit_v2() || nvmlDeviceGetHandleByIndex_v2(0, &device))
		return UNKNOWN;
	ask(argv[1]); /* what is done once, such as opening files, is done on the main thread */
	pthread_attr_init(&attributes);
	if (pthread_attr_setstacksize(&attributes, (size_t)atoll(argv[2])) || pthread_create(&thread, &attributes, answer, argv[1]))
		return UNKNOWN;
	pthread_join(thread, &result);
	return *(int *)result;
}
