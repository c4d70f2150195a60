/* Kernels of a known length, for programs that must keep a device busy. */
#ifndef AQ_CLIENT_WORK_H
#define AQ_CLIENT_WORK_H

#include <stdint.h>

#include "client/driver.h"

/* Load the kernel into the current context. */
CUresult work_prepare(void);

/* Launch one kernel that takes `kernel_us` microseconds of a whole device. */
CUresult work_launch(uint64_t kernel_us);

#endif
