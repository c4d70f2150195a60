/* SPDX-License-Identifier: Apache-2.0 */
/* No call of CUDA or NVML is a cancellation point: a thread cancelled inside the shim would leave locks held and counts wrong. So the shim
 * bypasses libc's cancellation points by system calls, or disables cancellation around them. */
#ifndef AQ_CANCEL_H
#define AQ_CANCEL_H

#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* Less than a second. A signal ends it early. */
static inline void aq_sleep(int64_t ns)
{
	int saved_errno = errno;

	syscall(SYS_nanosleep, &(struct timespec){ .tv_nsec = (long)ns }, NULL);
	errno = saved_errno;
}

/* Around code that may open files: returns the state to pass to aq_allow_cancel. */
static inline int aq_hold_cancel(void)
{
	int before;

	pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &before);
	return before;
}

static inline void aq_allow_cancel(int before)
{
	pthread_setcancelstate(before, NULL);
}

#endif
