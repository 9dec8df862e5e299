/* A stand-in for the CANN runtime: one device in host memory. torch_npu loads it in place of libascendcl.

   Memory is malloc'd and filled with 0xFF (NaN, or -1), so that reading what nobody wrote shows. Nothing is
   computed: operators run in Python (emulator.py). Streams and events are numbers; what happens to them is
   counted, and told to a callback, which may hold back work and run it late. It proves call shapes and host
   logic, never results, timing or ordering of real hardware. build.py appends a function that returns 0 for
   each other name that torch_npu asks for. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SYNC_DEVICE, SYNC_STREAM, SYNC_EVENT, COPY, COPY_ASYNC, SET, ALLOCATE, RELEASE, RECORD, WAIT, QUERY, KINDS };

typedef int (*listener)(int kind, uint64_t first, uint64_t second, uint64_t bytes);

static listener listening;
static __thread int device;
static uint64_t counts[KINDS], largest_allocation, next_handle = 0x1000;

void stub_listen(listener to) { listening = to; }
uint64_t stub_count(int kind) { return counts[kind]; }
uint64_t stub_largest_allocation(void) { return largest_allocation; }
void stub_reset(void) { memset(counts, 0, sizeof counts); largest_allocation = 0; }

/* 1 unless whoever listens says otherwise, which matters for a query alone. */
static int tell(int kind, const void *first, const void *second, uint64_t bytes) {
  __atomic_add_fetch(&counts[kind], 1, __ATOMIC_SEQ_CST);
  return listening ? listening(kind, (uint64_t)first, (uint64_t)second, bytes) : 1;
}

static int allocate(void **at, size_t bytes) {
  size_t whole = (bytes + 511) / 512 * 512 + 512;
  *at = aligned_alloc(512, whole);
  if (!*at) return 207001;
  memset(*at, 0xFF, whole);
  return 0;
}

static int handle(void **at) {
  *at = (void *)__atomic_add_fetch(&next_handle, 16, __ATOMIC_SEQ_CST);
  return 0;
}

/* memory */
int aclrtMalloc(void **at, size_t bytes, int policy) {
  if (bytes > largest_allocation) largest_allocation = bytes;
  int failed = allocate(at, bytes);
  tell(ALLOCATE, *at, 0, bytes);
  return failed;
}
int aclrtMallocAlign32(void **at, size_t bytes, int policy) { return aclrtMalloc(at, bytes, policy); }
int aclrtMallocHost(void **at, size_t bytes) { return allocate(at, bytes); }
int aclrtMallocHostWithCfg(void **at, size_t bytes, void *config) { return allocate(at, bytes); }
int aclrtFree(void *at) { tell(RELEASE, at, 0, 0); free(at); return 0; }
int aclrtFreeHost(void *at) { free(at); return 0; }
int aclrtMemcpy(void *to, size_t room, const void *from, size_t bytes, int kind) {
  tell(COPY, to, from, bytes);
  memmove(to, from, bytes);
  return 0;
}
int aclrtMemcpyAsync(void *to, size_t room, const void *from, size_t bytes, int kind, void *stream) {
  tell(COPY_ASYNC, to, from, bytes);
  memmove(to, from, bytes);
  return 0;
}
int aclrtMemcpyAsyncWithCondition(void *to, size_t room, const void *from, size_t bytes, int kind, void *stream) {
  return aclrtMemcpyAsync(to, room, from, bytes, kind, stream);
}
int aclrtMemset(void *at, size_t room, int value, size_t bytes) { tell(SET, at, 0, bytes); memset(at, value, bytes); return 0; }
int aclrtMemsetAsync(void *at, size_t room, int value, size_t bytes, void *stream) { return aclrtMemset(at, room, value, bytes); }
int aclrtGetMemInfo(int kind, size_t *free_bytes, size_t *total) {
  const char *given = getenv("K3_FAKE_NPU_BYTES");
  *total = given ? strtoull(given, 0, 10) : (size_t)64 << 30;
  *free_bytes = *total / 16 * 15;
  return 0;
}
int aclrtReserveMemAddress(void **at, size_t bytes, size_t align, void *expected, long flags) { return 207000; }

/* the device */
int aclrtGetDeviceCount(unsigned *count) {
  const char *given = getenv("K3_FAKE_NPU_COUNT");
  *count = given ? atoi(given) : 1;
  return 0;
}
int aclrtGetDevice(int *id) { *id = device; return 0; }
int aclrtSetDevice(int id) { device = id; return 0; }
const char *aclrtGetSocName(void) { const char *given = getenv("K3_FAKE_SOC"); return given ? given : "Ascend910_9391"; }
const char *aclGetRecentErrMsg(void) { return "stand-in CANN runtime"; }
void aclAppLog(int level, ...) {}
int aclrtGetDeviceInfo(unsigned id, int what, long *value) { *value = 24; return 0; }
int aclrtGetDeviceResLimit(int id, int kind, unsigned *value) { *value = kind ? 48 : 24; return 0; }
int aclrtGetStreamResLimit(void *stream, int kind, unsigned *value) { *value = kind ? 48 : 24; return 0; }
int aclrtGetResInCurrentThread(int kind, unsigned *value) { *value = kind ? 48 : 24; return 0; }
int aclGetDeviceCapability(unsigned id, int kind, int *value) { *value = 0; return 0; }
int aclrtDeviceCanAccessPeer(int *can, int a, int b) { *can = 1; return 0; }
int aclrtGetSysParamOpt(int kind, long *value) { *value = 0; return 0; }
int aclrtGetPrimaryCtxState(int id, unsigned *flags, int *active) { if (flags) *flags = 0; *active = 1; return 0; }
size_t aclGetCompileoptSize(int option) { return 16; }
int aclGetCompileopt(int option, char *value, size_t room) { strncpy(value, "0", room); return 0; }
int aclrtPeekAtLastError(int level) { return 0; }

/* streams and events */
int aclrtCreateStream(void **at) { return handle(at); }
int aclrtCreateStreamWithConfig(void **at, unsigned priority, unsigned flags) { return handle(at); }
int aclrtCreateEventExWithFlag(void **at, unsigned flags) { return handle(at); }
int aclrtCreateEventWithFlag(void **at, unsigned flags) { return handle(at); }
int aclrtGetCurrentContext(void **at) { return handle(at); }
int aclrtStreamGetId(void *stream, int *id) { *id = 1; return 0; }
int aclrtGetStreamOverflowSwitch(void *stream, unsigned *value) { *value = 0; return 0; }
int aclrtSynchronizeDevice(void) { tell(SYNC_DEVICE, 0, 0, 0); return 0; }
int aclrtSynchronizeDeviceWithTimeout(int ms) { tell(SYNC_DEVICE, 0, 0, 0); return 0; }
int aclrtSynchronizeStream(void *stream) { tell(SYNC_STREAM, stream, 0, 0); return 0; }
int aclrtSynchronizeStreamWithTimeout(void *stream, int ms) { tell(SYNC_STREAM, stream, 0, 0); return 0; }
int aclrtSynchronizeEvent(void *event) { tell(SYNC_EVENT, event, 0, 0); return 0; }
int aclrtSynchronizeEventWithTimeout(void *event, int ms) { tell(SYNC_EVENT, event, 0, 0); return 0; }
int aclrtRecordEvent(void *event, void *stream) { tell(RECORD, event, stream, 0); return 0; }
int aclrtStreamWaitEvent(void *stream, void *event) { tell(WAIT, stream, event, 0); return 0; }
int aclrtQueryEventStatus(void *event, int *status) { *status = tell(QUERY, event, 0, 0); return 0; }
int aclrtQueryEventWaitStatus(void *event, int *status) { *status = 0; return 0; }
int aclrtStreamQuery(void *stream, int *status) { *status = 0; return 0; }
int aclrtEventElapsedTime(float *ms, void *from, void *to) { *ms = 1.0f; return 0; }

/* what only a real device can do */
int aclopCompileAndExecute(void) { return 507000; }
int aclopCompileAndExecuteV2(void) { return 507000; }
int aclrtLaunchKernelWithHostArgs(void) { return 507000; }
int rtKernelLaunch(void) { return 507000; }
int aclmdlRICaptureGetInfo(void *stream, int *status, void **model) { *status = 0; if (model) *model = 0; return 0; }
