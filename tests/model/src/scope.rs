//! What one run of the checker covers: who takes part, which faults may happen, and which step, if
//! any, is wrong on purpose.

/// Requests, buyers, servers and programs that a state has room for.
pub(crate) const REQUESTS: usize = 3;
pub(crate) const BUYERS: usize = 2;
pub(crate) const SERVERS: usize = 2;
pub(crate) const PROGRAMS: usize = 9;
/// Calls that may be on their way without anybody waiting for them.
pub(crate) const LATE: usize = 3;

/// What a program does, and on which server. Each client's program is one call of the API, so a
/// repeat of a request is a second program; the others come back for ever.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    Reserve {
        request: usize,
        server: usize,
    },
    Release {
        request: usize,
        server: usize,
    },
    Sweeper {
        server: usize,
    },
    Poller {
        server: usize,
    },
    Rebuilder {
        server: usize,
    },
    Settler {
        server: usize,
    },
    /// A call for the one adjustment.
    Adjuster {
        server: usize,
    },
}

impl Role {
    /// The request that a client's call is about; keepers have none.
    #[must_use]
    pub fn request(self) -> Option<usize> {
        match self {
            Role::Reserve { request, .. } | Role::Release { request, .. } => Some(request),
            Role::Sweeper { .. }
            | Role::Poller { .. }
            | Role::Rebuilder { .. }
            | Role::Settler { .. }
            | Role::Adjuster { .. } => None,
        }
    }

    /// Whether it is one call of a client, and over after it.
    #[must_use]
    pub fn is_client(self) -> bool {
        self.request().is_some() || matches!(self, Role::Adjuster { .. })
    }

    #[must_use]
    pub fn server(self) -> usize {
        match self {
            Role::Reserve { server, .. }
            | Role::Release { server, .. }
            | Role::Sweeper { server }
            | Role::Poller { server }
            | Role::Rebuilder { server }
            | Role::Settler { server }
            | Role::Adjuster { server } => server,
        }
    }
}

/// How many faults of each kind may still happen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Faults {
    /// A server dies; each call that it had under way may still arrive.
    pub crashes: u8,
    /// A call is not answered; it runs later, or never.
    pub losses: u8,
    /// The engine forgets everything, and stays the same server.
    pub flushes: u8,
    /// The engine is another server now, with all the data or without the last write.
    pub failovers: u8,
}

/// A step that is wrong on purpose. Each is caught in a test, or the model would prove nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Broken {
    /// `unacked` is cleared before SQL has the row.
    AcknowledgeBeforeCommit,
    /// RESERVED is answered before SQL has the row.
    AnswerBeforeCommit,
    /// The engine gives back first, SQL hears of it second.
    EngineBeforeSql,
    /// SQL takes a row of any epoch (V7).
    InsertOfAnyEpoch,
    /// A commit without an answer counts as failed (V1).
    GiveBackOnUnknown,
    /// `rebuild_begin` keeps what is unacked (W8).
    BeginKeepsUnacked,
    /// A released row keeps the epoch of its insert (W1), so a rebuild can't tell that the counter
    /// knew it at the raise.
    ReleaseKeepsEpoch,
    /// `rebuild_end` ends any rebuild (V7).
    EndOfAnyEpoch,
    /// A rebuild raises the epoch from whatever it is. That is safe, but two servers that meet one
    /// loss undo each other's rebuilds.
    RaiseFromAnyEpoch,
    /// RELEASED is answered although the engine said `retry` (W3).
    AnswerBeforeEngine,
    /// A rebuild loads no marks (W9).
    SnapshotWithoutMarks,
    /// `release.lua` runs while a rebuild loads (V8).
    ReleaseWhileRebuilding,
    /// `release.lua` leaves no mark (V3).
    ReleaseWithoutMark,
    /// A release that finds no row looks no further (V10).
    ReleaseTrustsMissingRow,
    /// A rebuild raises the epoch when all is loaded.
    ReadBeforeRaise,
    /// A rebuild that gives up takes its raise back, so that its epoch is begun again (W12).
    RaiseRolledBack,
    /// A rebuild sells by the counter as it was at the raise, whatever was released since.
    CounterAtRaise,
    /// A rebuild takes tombstones for rows that the counter knew.
    CountsTombstones,
    /// A rebuild takes a chunk without an answer for loaded. The numbers of the chunks alone make
    /// that safe.
    GoesOnUnanswered,
    /// A rebuild's chunks are applied as they come, and not counted at the end. That alone is safe:
    /// who is not answered gives up.
    ChunksWithoutNumbers,
    /// A rebuilder looks whether the offer is settled before it reads the epoch.
    LooksBeforeEpoch,
    /// Scripts don't compare the server's identity (V9).
    AnyServer,
    /// Settle raises no epoch.
    SettleWithoutRaise,
    /// `add_units.lua` adds although a rebuild has counted the units (W10).
    AddsAtAnyEpoch,
    /// The sweeper puts back what is set aside before SQL has the request as cancelled (W11).
    PutsBackBeforeSql,
    /// SQL takes away units that were set aside under another epoch.
    TakesAwayAtAnyEpoch,
    /// The engine forgets which adjustments it has done, so a late script does them again.
    AdjustsWithoutMarks,
}

/// One bounded world.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Scope {
    pub name: &'static str,
    pub total: u8,
    /// Units that the one adjustment adds, or takes away.
    pub delta: i8,
    /// Who makes each request, and for how many units.
    pub buyers: [usize; REQUESTS],
    pub units: [u8; REQUESTS],
    pub roles: Vec<Role>,
    pub faults: Faults,
    /// Rebuilds stop to raise the epoch above this one, so that the world stays finite.
    pub epochs: u8,
    /// Whether rebuilders wait for each other, as the lock in the engine makes them.
    pub patient: bool,
    pub broken: &'static [Broken],
}

impl Scope {
    #[must_use]
    pub(crate) fn new(
        name: &'static str,
        total: u8,
        roles: &[&[Role]],
        faults: Faults,
        epochs: u8,
    ) -> Self {
        let roles = roles.concat();
        assert!(roles.len() <= PROGRAMS, "a state has room for {PROGRAMS} programs");
        Self {
            name,
            total,
            delta: 0,
            buyers: [0, 1, 0],
            units: [1; REQUESTS],
            roles,
            faults,
            epochs,
            patient: false,
            broken: &[],
        }
    }

    /// The same world with wrong steps.
    #[must_use]
    pub fn broken(self, broken: &'static [Broken]) -> Self {
        Self { broken, ..self }
    }

    pub(crate) fn units_adjusted(&self) -> u8 {
        self.delta.unsigned_abs()
    }

    pub(crate) fn is(&self, broken: Broken) -> bool {
        self.broken.contains(&broken)
    }
}
