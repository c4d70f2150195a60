/* Modules and libraries: code and variables that a program loads lie in device memory, and no call says how many bytes of it. */
#ifndef AQ_INTERPOSE_MODULE_H
#define AQ_INTERPOSE_MODULE_H

#include <stdint.h>

/* A context of the device began: what the process holds is to be looked at afresh. */
void aq_modules_context_begun(int device);
/* A context is gone, and what was loaded in it. `owner` as in struct aq_place. */
void aq_modules_context_ended(int device, uint64_t owner);

/* In a forked child. */
void aq_modules_forget(void);

#endif
