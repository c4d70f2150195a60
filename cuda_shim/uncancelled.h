/* No call of CUDA or NVML is a place at which a thread can be cancelled: one that ended in ours would leave locks taken and books open. So
 * what libc makes such a place is asked of the kernel past it, or done with cancellation held off. */
#ifndef AQ_UNCANCELLED_H
#define AQ_UNCANCELLED_H

#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* Less than a second. A signal ends it early. */
static inline void aq_sleep(int64_t ns)
{
	int of_the_application = errno;

	syscall(SYS_nanosleep, &(struct timespec){ .tv_nsec = (long)ns }, NULL);
	errno = of_the_application;
}

/* For what calls others who may open files: answers what to give back to aq_allow_cancel. */
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
