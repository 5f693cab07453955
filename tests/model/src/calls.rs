//! Calls of a store that change something: what may arrive although nobody waits for it any more.

use crate::{
    adjust::Decision,
    engine::{Data, End, GivenBack},
    rebuild::Chunk,
    scope::Scope,
    world::World,
};

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Call {
    Reserve { request: u8, order: u8, epoch: u8 },
    Acknowledge { buyer: u8, order: u8, epoch: u8 },
    GiveBack { request: u8, epoch: u8 },
    Freeze { epoch: u8 },
    Begin { epoch: u8, total: u8 },
    Load { epoch: u8, chunk: Chunk },
    End(End),
    Purge { epoch: u8 },
    Insert { request: u8, order: u8, epoch: u8 },
    Release { request: u8 },
    Tombstone { request: u8, order: u8 },
    MarkReleased { request: u8 },
    Raise { seen: u8, above: u8 },
    Settle,
    SetAside { epoch: u8 },
    AddUnits { epoch: u8 },
    ForgetAside { epoch: u8 },
    PutBack { epoch: u8 },
    Decide(Decision),
    MarkApplied,
}

impl Call {
    /// Whether it goes to the engine.
    #[must_use]
    pub fn is_script(self) -> bool {
        match self {
            Call::Reserve { .. }
            | Call::Acknowledge { .. }
            | Call::GiveBack { .. }
            | Call::Freeze { .. }
            | Call::Begin { .. }
            | Call::Load { .. }
            | Call::End(_)
            | Call::Purge { .. }
            | Call::SetAside { .. }
            | Call::AddUnits { .. }
            | Call::ForgetAside { .. }
            | Call::PutBack { .. } => true,
            Call::Insert { .. }
            | Call::Release { .. }
            | Call::Tombstone { .. }
            | Call::MarkReleased { .. }
            | Call::Raise { .. }
            | Call::Settle
            | Call::Decide(_)
            | Call::MarkApplied => false,
        }
    }
}

impl World {
    /// `release.lua`, and whether SQL allows it.
    pub fn give_back(&mut self, scope: &Scope, request: usize, epoch: u8) -> GivenBack {
        let given_back = self.engine.release(scope, request, epoch);
        self.told.guessed |=
            given_back == GivenBack::Released && !self.sql.rows[request].state.is_over();
        given_back
    }

    /// `purge.lua`: deletes all keys of the offer.
    pub fn purge(&mut self, epoch: u8) {
        if self.engine.data.epoch < epoch {
            self.engine.data = Data::EMPTY;
        }
    }

    /// Runs a call for nobody.
    pub fn arrive(&mut self, scope: &Scope, call: Call) {
        match call {
            Call::Reserve { request, order, epoch } => {
                self.engine.reserve(scope, request.into(), order, epoch);
            }
            Call::Acknowledge { buyer, order, epoch } => {
                self.engine.acknowledge(scope, buyer.into(), order, epoch);
            }
            Call::GiveBack { request, epoch } => {
                self.give_back(scope, request.into(), epoch);
            }
            Call::Freeze { epoch } => self.engine.freeze(epoch),
            Call::Begin { epoch, total } => {
                self.engine.begin(scope, epoch, total);
            }
            Call::Load { epoch, chunk } => {
                self.engine.load(scope, epoch, chunk);
            }
            Call::End(end) => {
                self.engine.end(scope, end);
            }
            Call::Purge { epoch } => self.purge(epoch),
            Call::Insert { request, order, epoch } => {
                self.sql.insert(scope, request.into(), order, epoch);
            }
            Call::Release { request } => {
                self.sql.release(scope, request.into());
            }
            Call::Tombstone { request, order } => self.sql.tombstone(request.into(), order),
            Call::MarkReleased { request } => self.sql.mark_released(request.into()),
            Call::Raise { seen, above } => {
                self.sql.raise(scope, seen, above);
            }
            Call::Settle => {
                self.sql.settle(scope);
            }
            Call::SetAside { epoch } => {
                self.engine.set_aside(scope, epoch);
            }
            Call::AddUnits { epoch } => {
                self.engine.add_units(scope, epoch);
            }
            Call::ForgetAside { epoch } => {
                self.engine.forget_aside(scope, epoch);
            }
            Call::PutBack { epoch } => {
                self.engine.put_back(scope, epoch);
            }
            Call::Decide(decision) => {
                self.sql.decide(scope, decision);
            }
            Call::MarkApplied => self.sql.mark_applied(),
        }
    }

    /// Lets a call travel on alone; it is forgotten if too many do.
    pub fn let_go(&mut self, call: Call) {
        if let Some(free) = self.late.iter_mut().find(|late| late.is_none()) {
            *free = Some(call);
            self.sort_late();
        }
    }

    /// Takes a call that arrives now.
    pub fn take_late(&mut self, index: usize) -> Option<Call> {
        let call = self.late[index].take();
        self.sort_late();
        call
    }

    /// Calls that were under way to a server that is gone.
    pub fn lose_scripts(&mut self) {
        for late in &mut self.late {
            *late = late.filter(|call| !call.is_script());
        }
        self.sort_late();
    }

    fn sort_late(&mut self) {
        self.late.sort_unstable_by_key(|call| (call.is_none(), *call));
    }
}
