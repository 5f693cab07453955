//! A timer that is exact to some 50 µs; tokio's rounds up to a whole millisecond, and 50 calls that
//! were meant to come one by one would come at once.

use std::{
    io,
    os::fd::OwnedFd,
    task::{Context, Poll, ready},
    time::Duration,
};

use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
    timerfd_settime,
};
use tokio::io::unix::AsyncFd;

/// Wakes one task at one time after the other.
#[derive(Debug)]
pub(super) struct Timer {
    fd: AsyncFd<OwnedFd>,
    armed: Option<Duration>,
}

impl Timer {
    pub(super) fn new() -> io::Result<Self> {
        let flags = TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC;
        let timer = timerfd_create(TimerfdClockId::Monotonic, flags)?;
        #[allow(deprecated, reason = "what replaces it is unsafe; an OwnedFd is what it asks for")]
        let fd = AsyncFd::new(timer)?;
        Ok(Self { fd, armed: None })
    }

    /// Ready once it is `at`; both times count from the same moment.
    pub(super) fn poll(
        &mut self,
        cx: &mut Context<'_>,
        at: Duration,
        now: Duration,
    ) -> Poll<io::Result<()>> {
        let Some(left) = at.checked_sub(now).filter(|left| !left.is_zero()) else {
            return Poll::Ready(Ok(()));
        };
        if self.armed != Some(at) {
            let once = Timespec::default();
            let value = Timespec {
                tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
                tv_nsec: left.subsec_nanos().into(),
            };
            let when = Itimerspec { it_interval: once, it_value: value };
            // Whatever had fired before is forgotten by this.
            timerfd_settime(self.fd.get_ref(), TimerfdTimerFlags::empty(), &when)?;
            self.armed = Some(at);
        }
        loop {
            let mut ready = ready!(self.fd.poll_read_ready(cx))?;
            let mut expirations = [0; 8];
            match ready.try_io(|fd| Ok(rustix::io::read(fd, &mut expirations)?)) {
                Ok(read) => {
                    self.armed = None;
                    return Poll::Ready(read.map(drop));
                }
                Err(_would_block) => {}
            }
        }
    }
}
