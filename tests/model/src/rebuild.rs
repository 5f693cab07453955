//! The rebuild, as `src/recovery.rs` and `src/recovery/rebuild.rs` have it: raise the epoch, commit,
//! then read and load one row after the other, while nobody waits for a lock. A page is one row.

use crate::{
    engine::{End, Held, small},
    programs::Step,
    scope::{Broken, Role, Scope},
    world::World,
};

/// How far a rebuild has come, and what the rows that it read add up to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Loading {
    /// The epoch that SQL was seen at.
    pub seen: u8,
    pub epoch: u8,
    /// The counter as it was when the epoch was raised.
    pub reserved: u8,
    /// The total, likewise.
    pub total: u8,
    /// Where the next page begins.
    pub from: u8,
    pub chunks: u8,
    /// Units of rows that were read as live.
    pub live: u8,
    /// Units of rows that were released since the raise, before they were read.
    pub released_since: u8,
}

/// A row as it was read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Chunk {
    pub number: u8,
    pub row: Held,
    /// Loaded as a reservation; otherwise as a mark.
    pub is_live: bool,
}

/// The page after the chunk that is on its way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Ahead {
    NotRead,
    Read(Chunk),
    /// There is none.
    End,
}

impl World {
    /// Whether the offer is settled and what `levels.lua` says, after SQL was seen at this epoch.
    pub(crate) fn look_at_levels(&mut self, scope: &Scope, program: usize, sql: u8) {
        let server = scope.roles[program].server();
        let looked_before = scope.is(Broken::LooksBeforeEpoch);
        let sql = if looked_before { self.sql.epoch } else { sql };
        let (known, engine) = (self.known[server], self.engine.data.epoch);
        if self.sql.settled && !looked_before {
            self.close(scope, program);
        } else if self.engine.guard(scope, None).is_ok() && engine == sql && sql >= known {
            self.adopt(server, sql);
            self.close(scope, program);
        } else if scope.patient && self.is_being_rebuilt(scope) {
            self.close(scope, program);
        } else {
            let above = engine.max(known);
            let loading = Loading::new(sql, sql.max(above) + 1, 0, self.sql.total);
            self.programs[program].step = match scope.is(Broken::ReadBeforeRaise) {
                true => Step::Begin(loading),
                false => Step::Raise { sql, above, loaded: None },
            };
        }
    }

    /// Whether a rebuilder has the lock in the engine.
    fn is_being_rebuilt(&self, scope: &Scope) -> bool {
        scope.roles.iter().zip(&self.programs).any(|(role, program)| {
            matches!(role, Role::Rebuilder { .. })
                && !matches!(program.step, Step::Idle | Step::Levels { .. })
        })
    }

    pub(crate) fn raise(
        &mut self,
        scope: &Scope,
        program: usize,
        seen: u8,
        above: u8,
        loaded: Option<Loading>,
    ) {
        let (reserved, total) = (self.sql.reserved, self.sql.total);
        match (self.sql.raise(scope, seen, above), loaded) {
            (None, _) => self.close(scope, program),
            (Some(_), Some(loaded)) => self.loaded(program, Loading { reserved, total, ..loaded }),
            (Some(epoch), None) => {
                self.programs[program].step =
                    Step::Begin(Loading::new(seen, epoch, reserved, total));
            }
        }
    }

    pub(crate) fn begin_rebuild(&mut self, scope: &Scope, program: usize, loading: Loading) {
        match self.engine.begin(scope, loading.epoch, loading.total) {
            true => self.programs[program].step = Step::Read(loading),
            false => self.give_up(scope, program),
        }
    }

    /// Reads the next page while nothing is on its way.
    pub(crate) fn read(&mut self, scope: &Scope, program: usize, mut loading: Loading) {
        match self.page(scope, &mut loading) {
            Some(chunk) => {
                self.programs[program].step = Step::Load { loading, chunk, ahead: Ahead::NotRead };
            }
            None => self.all_read(scope, program, loading),
        }
    }

    /// Reads the next page while the last one is loaded; `None` if there is no such read to do.
    #[must_use]
    pub(crate) fn read_ahead(&self, scope: &Scope, program: usize) -> Option<World> {
        let Step::Load { mut loading, chunk, ahead: Ahead::NotRead } = self.programs[program].step
        else {
            return None;
        };
        let mut next = *self;
        let ahead = self.page(scope, &mut loading).map_or(Ahead::End, Ahead::Read);
        next.programs[program].step = Step::Load { loading, chunk, ahead };
        Some(next)
    }

    pub(crate) fn load(
        &mut self,
        scope: &Scope,
        program: usize,
        loading: Loading,
        chunk: Chunk,
        ahead: Ahead,
    ) {
        if !self.engine.load(scope, loading.epoch, chunk) {
            return self.give_up(scope, program);
        }
        self.after_chunk(scope, program, loading, ahead);
    }

    /// The chunk is loaded: on with the next, if it was read.
    pub(crate) fn after_chunk(
        &mut self,
        scope: &Scope,
        program: usize,
        loading: Loading,
        ahead: Ahead,
    ) {
        match ahead {
            Ahead::NotRead => self.programs[program].step = Step::Read(loading),
            Ahead::Read(chunk) => {
                self.programs[program].step = Step::Load { loading, chunk, ahead: Ahead::NotRead };
            }
            Ahead::End => self.all_read(scope, program, loading),
        }
    }

    pub(crate) fn end_rebuild(&mut self, scope: &Scope, program: usize, end: End) {
        if self.engine.end(scope, end) {
            self.adopt(scope.roles[program].server(), end.epoch);
        }
        self.close(scope, program);
    }

    /// Leaves a rebuild as it is, or another call of a program.
    pub(crate) fn give_up(&mut self, scope: &Scope, program: usize) {
        if let Step::Begin(loading) | Step::Read(loading) | Step::Load { loading, .. } =
            self.programs[program].step
            && loading.epoch == self.sql.epoch
            && scope.is(Broken::RaiseRolledBack)
        {
            self.sql.epoch = loading.seen;
        }
        self.close(scope, program);
    }

    /// The next row there is, and what it adds to the figures.
    fn page(&self, scope: &Scope, loading: &mut Loading) -> Option<Chunk> {
        let from = usize::from(loading.from);
        let mut rows = self.sql.rows.iter().enumerate().skip(from);
        let (request, row) = rows.find(|(_, row)| row.state.is_live() || row.state.is_over())?;
        let is_live = row.state.is_live();
        let is_counted = row.counted || scope.is(Broken::CountsTombstones);
        loading.from = small(request) + 1;
        loading.chunks += 1;
        if is_live {
            loading.live += scope.units[request];
        } else if row.epoch >= loading.epoch && is_counted && !scope.is(Broken::CounterAtRaise) {
            loading.released_since += scope.units[request];
        }
        let row = Held { request: small(request), order: row.order };
        Some(Chunk { number: loading.chunks, row, is_live })
    }

    fn all_read(&mut self, scope: &Scope, program: usize, loading: Loading) {
        if scope.is(Broken::ReadBeforeRaise) {
            let Loading { seen, epoch, .. } = loading;
            let raise = Step::Raise { sql: seen, above: epoch - 1, loaded: Some(loading) };
            self.programs[program].step = raise;
        } else {
            self.loaded(program, loading);
        }
    }

    /// All is loaded: what is left to sell, by the rows or by the counter, whichever is more.
    fn loaded(&mut self, program: usize, loading: Loading) {
        let Loading { epoch, reserved, total, chunks, live, released_since, .. } = loading;
        let counted = reserved.saturating_sub(released_since);
        self.told.miscounted |= counted != live;
        let stock = total.saturating_sub(live.max(counted));
        self.programs[program].step = Step::End(End { epoch, chunks, stock });
    }
}

impl Loading {
    fn new(seen: u8, epoch: u8, reserved: u8, total: u8) -> Self {
        Self { seen, epoch, reserved, total, from: 0, chunks: 0, live: 0, released_since: 0 }
    }
}
