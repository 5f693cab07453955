//! AdjustStock, as `src/activities/adjust.rs` and `src/adjustments.rs` have it: one request for more
//! or for fewer units, by several calls, and what the sweeper makes of what broke off.

use crate::{
    engine::{Engine, Refusal},
    programs::Step,
    scope::{Broken, Scope},
    sql::Sql,
    world::World,
};

/// What the segment knows of the request, under its epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Mark {
    None,
    SetAside,
    Added,
    TakenAway,
    PutBack,
}

/// The request's row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Adjustment {
    None,
    Pending { epoch: u8 },
    Applied { epoch: u8 },
    Cancelled,
}

/// What SQL is asked to decide.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Decision {
    Add,
    TakeAway { epoch: u8 },
    Cancel { epoch: u8 },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Aside {
    Refused(Refusal),
    Done,
    Insufficient,
    Decided,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Followed {
    Done,
    Retry,
    Contradiction,
}

impl Engine {
    /// `add_units.lua`.
    pub fn add_units(&mut self, scope: &Scope, epoch: u8) -> Followed {
        if let Some(followed) = self.other_epoch(scope, epoch)
            && !(scope.is(Broken::AddsAtAnyEpoch) && followed == Followed::Done)
        {
            return followed;
        }
        match self.data.mark {
            Mark::None => {}
            Mark::Added => return Followed::Done,
            Mark::SetAside | Mark::TakenAway | Mark::PutBack => return Followed::Contradiction,
        }
        self.note(scope, Mark::Added);
        self.data.stock = self.data.stock.map(|stock| stock + scope.units_adjusted());
        self.data.total += scope.units_adjusted();
        Followed::Done
    }

    /// `set_aside.lua`.
    pub fn set_aside(&mut self, scope: &Scope, epoch: u8) -> Aside {
        let stock = match self.guard(scope, Some(epoch)) {
            Ok(stock) => stock,
            Err(refusal) => return Aside::Refused(refusal),
        };
        match self.data.mark {
            Mark::None => {}
            Mark::SetAside => return Aside::Done,
            Mark::Added | Mark::TakenAway | Mark::PutBack => return Aside::Decided,
        }
        let units = scope.units_adjusted();
        if stock.min((self.data.total - self.data.aside).saturating_sub(1)) < units {
            return Aside::Insufficient;
        }
        self.data.mark = Mark::SetAside;
        self.data.stock = Some(stock - units);
        self.data.aside += units;
        Aside::Done
    }

    /// `forget_aside.lua`.
    pub fn forget_aside(&mut self, scope: &Scope, epoch: u8) -> Followed {
        if let Some(followed) = self.other_epoch(scope, epoch) {
            return followed;
        }
        match self.data.mark {
            Mark::SetAside => {}
            Mark::TakenAway => return Followed::Done,
            Mark::None | Mark::Added | Mark::PutBack => return Followed::Contradiction,
        }
        self.note(scope, Mark::TakenAway);
        self.data.aside -= scope.units_adjusted();
        self.data.total -= scope.units_adjusted();
        Followed::Done
    }

    /// `put_back.lua`.
    pub fn put_back(&mut self, scope: &Scope, epoch: u8) -> Followed {
        if let Some(followed) = self.other_epoch(scope, epoch) {
            return followed;
        }
        if self.data.mark == Mark::SetAside {
            self.note(scope, Mark::PutBack);
            self.data.aside -= scope.units_adjusted();
            self.data.stock = self.data.stock.map(|stock| stock + scope.units_adjusted());
        }
        Followed::Done
    }

    fn note(&mut self, scope: &Scope, mark: Mark) {
        self.data.mark = if scope.is(Broken::AdjustsWithoutMarks) { Mark::None } else { mark };
    }

    fn other_epoch(&self, scope: &Scope, epoch: u8) -> Option<Followed> {
        if self.guard(scope, None).is_err() || self.data.epoch < epoch {
            Some(Followed::Retry)
        } else if self.data.epoch > epoch {
            Some(Followed::Done)
        } else {
            None
        }
    }
}

impl Sql {
    /// `decide`: false at another epoch, or when nothing may be stored.
    pub fn decide(&mut self, scope: &Scope, decision: Decision) -> bool {
        if self.adjustment != Adjustment::None {
            return true;
        }
        let units = scope.units_adjusted();
        let epoch = self.epoch;
        self.adjustment = match decision {
            Decision::Add if self.settled => return false,
            Decision::Add => {
                self.total += units;
                Adjustment::Pending { epoch }
            }
            Decision::TakeAway { epoch: aside }
                if aside != epoch && !scope.is(Broken::TakesAwayAtAnyEpoch) =>
            {
                return false;
            }
            Decision::TakeAway { .. } if self.settled || self.total < self.reserved + units => {
                Adjustment::Cancelled
            }
            Decision::TakeAway { epoch } => {
                self.total -= units;
                Adjustment::Pending { epoch }
            }
            Decision::Cancel { .. } => Adjustment::Cancelled,
        };
        true
    }

    /// The engine has followed.
    pub fn mark_applied(&mut self) {
        if let Adjustment::Pending { epoch } = self.adjustment {
            self.adjustment = Adjustment::Applied { epoch };
        }
    }
}

impl World {
    /// A call of an operator begins.
    pub(crate) fn first_of_adjustment(&self, scope: &Scope) -> Step {
        match self.sql.adjustment {
            Adjustment::None if scope.delta > 0 => Step::Decide(Decision::Add),
            Adjustment::None => Step::SetAside,
            Adjustment::Pending { epoch } => Step::Follow { epoch },
            Adjustment::Applied { .. } | Adjustment::Cancelled => Step::Over,
        }
    }

    pub(crate) fn set_aside(&mut self, scope: &Scope, program: usize) {
        let server = scope.roles[program].server();
        let epoch = self.known[server];
        match self.engine.set_aside(scope, epoch) {
            Aside::Done => {
                self.programs[program].step = Step::Decide(Decision::TakeAway { epoch });
            }
            Aside::Insufficient => {
                self.programs[program].step = Step::Decide(Decision::Cancel { epoch });
            }
            Aside::Decided => self.settle_aside(scope, program, epoch),
            Aside::Refused(Refusal::Epoch(found)) if found > epoch => {
                self.adopt(server, found);
                self.programs[program].step = Step::SetAside;
            }
            // A repeat is another program.
            Aside::Refused(_) => self.close(scope, program),
        }
    }

    pub(crate) fn decide(&mut self, scope: &Scope, program: usize, decision: Decision) {
        if !self.sql.decide(scope, decision) {
            return self.close(scope, program);
        }
        match (decision, self.sql.adjustment) {
            (Decision::Add, Adjustment::Pending { epoch }) => {
                self.programs[program].step = Step::Follow { epoch };
            }
            (Decision::Add, _) => self.close(scope, program),
            (Decision::TakeAway { epoch } | Decision::Cancel { epoch }, _) => {
                self.settle_aside(scope, program, epoch);
            }
        }
    }

    /// SQL has decided; what is set aside under this epoch follows.
    fn settle_aside(&mut self, scope: &Scope, program: usize, aside: u8) {
        self.programs[program].step = match self.sql.adjustment {
            Adjustment::Pending { epoch } if epoch == aside => Step::Follow { epoch },
            Adjustment::None
            | Adjustment::Pending { .. }
            | Adjustment::Applied { .. }
            | Adjustment::Cancelled => Step::PutBack { epoch: aside },
        };
        if let Adjustment::Applied { epoch } = self.sql.adjustment
            && epoch == aside
        {
            self.close(scope, program);
        }
    }

    pub(crate) fn follow(&mut self, scope: &Scope, program: usize, epoch: u8) {
        let followed = match scope.delta > 0 {
            true => self.engine.add_units(scope, epoch),
            false => self.engine.forget_aside(scope, epoch),
        };
        match followed {
            Followed::Done => self.programs[program].step = Step::MarkApplied,
            Followed::Retry => self.close(scope, program),
            Followed::Contradiction => {
                let epoch = self.engine.data.epoch;
                self.programs[program].step = Step::Freeze { epoch };
            }
        }
    }

    pub(crate) fn put_back(&mut self, scope: &Scope, program: usize, epoch: u8) {
        let done = self.engine.put_back(scope, epoch) == Followed::Done;
        match self.sql.adjustment {
            // Only where it is wrong on purpose.
            Adjustment::None => {
                self.programs[program].step = Step::Decide(Decision::Cancel { epoch });
            }
            Adjustment::Pending { epoch } if done => {
                self.programs[program].step = Step::Follow { epoch };
            }
            Adjustment::Pending { .. } | Adjustment::Applied { .. } | Adjustment::Cancelled => {
                self.close(scope, program);
            }
        }
    }

    /// What the sweeper begins with where an adjustment broke off.
    pub(crate) fn finish_adjustment(&self, scope: &Scope) -> Option<Step> {
        if self.sql.settled || self.engine.guard(scope, None).is_err() {
            return None;
        }
        let epoch = self.engine.data.epoch;
        match self.sql.adjustment {
            _ if self.engine.data.mark == Mark::SetAside => {
                Some(match scope.is(Broken::PutsBackBeforeSql) {
                    true => Step::PutBack { epoch },
                    false => Step::Decide(Decision::Cancel { epoch }),
                })
            }
            Adjustment::Pending { epoch } => Some(Step::Follow { epoch }),
            Adjustment::None | Adjustment::Applied { .. } | Adjustment::Cancelled => None,
        }
    }
}
