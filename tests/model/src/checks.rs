//! The checker: what must hold, and what a run found.

use std::{fmt, time::Instant};

use stateright::{Checker, HasDiscoveries, Model, Property};

use crate::{
    engine::Frozen,
    faults::Action,
    scope::{REQUESTS, Scope},
    sql::{Order, RowState},
    world::World,
};

/// The names of what must hold.
pub mod property {
    pub const NEVER_OVERSOLD: &str = "I1 live units never exceed the total";
    pub const NEVER_OFFERED_TWICE: &str = "I1 the engine never offers what SQL counts";
    pub const DURABLE: &str = "I2 RESERVED is durable";
    pub const NOTHING_LOST: &str = "I3 at rest no unit is lost";
    pub const ONE_PER_BUYER: &str = "I4 one live reservation of a buyer";
    pub const GIVEN_BACK_ONCE: &str = "I5 units are given back once";
    pub const SAME_ANSWER: &str = "I6 same request, same answer";
    pub const ONLY_FORWARD: &str = "I7 states only move forward";
    pub const NO_GUESS: &str = "I8 nothing is given back on a guess";
    pub const ONE_REBUILD: &str = "one loss costs one rebuild";
    pub const COUNTED: &str = "the counter and the rows agree at a rebuild";
    pub const SETTLED: &str = "no insert follows a settlement";
}

impl Model for Scope {
    type State = World;
    type Action = Action;

    fn init_states(&self) -> Vec<World> {
        vec![World::new(self)]
    }

    fn actions(&self, world: &World, actions: &mut Vec<Action>) {
        world.possible(self, actions);
    }

    fn next_state(&self, world: &World, action: Action) -> Option<World> {
        world.after(self, action)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always(property::NEVER_OVERSOLD, |scope: &Self, world: &World| {
                world.sql.units(scope) <= world.sql.total
            }),
            Property::always(property::NEVER_OFFERED_TWICE, |scope: &Self, world: &World| {
                let stock = world.engine.data.stock.unwrap_or(0);
                !world.is_on_sale(scope) || stock + world.sql.units(scope) <= world.sql.total
            }),
            Property::always(property::DURABLE, |_: &Self, world: &World| {
                let is_durable = |request: usize| {
                    let (won, row) = (world.told.won[request], world.sql.rows[request]);
                    let is_there = !matches!(row.state, RowState::None | RowState::Refused);
                    won == 0 || (is_there && row.order == won)
                };
                !world.told.unfounded && (0..REQUESTS).all(is_durable)
            }),
            Property::always(property::NOTHING_LOST, |scope: &Self, world: &World| {
                !world.is_quiet() || world.trouble_at_rest(scope).is_none()
            }),
            Property::always(property::ONE_PER_BUYER, |scope: &Self, world: &World| {
                let is_live = |request: usize| {
                    world.sql.rows[request].state.is_live()
                        || world.sql.orders[request] == Order::Created
                };
                let rivals = |a: usize| (0..a).filter(move |&b| scope.buyers[a] == scope.buyers[b]);
                !(0..REQUESTS).any(|a| is_live(a) && rivals(a).any(is_live))
            }),
            Property::always(property::GIVEN_BACK_ONCE, |scope: &Self, world: &World| {
                let data = &world.engine.data;
                let is_whole = |stock| stock + data.units_held(scope) + data.aside == data.total;
                world.sql.reserved == world.sql.units(scope)
                    && (data.frozen == Frozen::Rebuilding || data.stock.is_none_or(is_whole))
            }),
            Property::always(property::SAME_ANSWER, |_: &Self, world: &World| {
                !world.told.contradicted
            }),
            Property::always(property::ONLY_FORWARD, |_: &Self, world: &World| {
                !world.sql.went_back
            }),
            Property::always(property::NO_GUESS, |_: &Self, world: &World| !world.told.guessed),
            Property::always(property::ONE_REBUILD, |scope: &Self, world: &World| {
                !scope.patient || world.sql.epoch <= 1 + scope.faults.flushes
            }),
            Property::always(property::COUNTED, |_: &Self, world: &World| !world.told.miscounted),
            Property::always(property::SETTLED, |_: &Self, world: &World| !world.sql.late_insert),
        ]
    }
}

/// What a run found.
#[derive(Debug)]
pub struct Outcome {
    pub scope: &'static str,
    pub worlds: usize,
    pub steps: usize,
    pub depth: usize,
    pub seconds: f64,
    /// Whether every world was looked at.
    pub complete: bool,
    /// What does not hold, and the shortest way there when one thread looked.
    pub violated: Vec<(&'static str, String)>,
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { scope, worlds, steps, depth, seconds, .. } = self;
        write!(f, "{scope}: {worlds} worlds by {steps} steps, {depth} deep, in {seconds:.1} s")?;
        self.violated.iter().try_for_each(|(name, trace)| write!(f, "\nviolated: {name}\n{trace}"))
    }
}

/// Walks all worlds of the scope, or until `wanted` is violated; without it, until anything is.
#[must_use]
pub fn check(scope: Scope, threads: usize, wanted: Option<&'static str>) -> Outcome {
    let started = Instant::now();
    let name = scope.name;
    let finish = match wanted {
        Some(wanted) => HasDiscoveries::AnyOf([wanted].into()),
        None => HasDiscoveries::AnyFailures,
    };
    let checker = scope.checker().threads(threads).finish_when(finish).spawn_bfs().join();
    let mut violated: Vec<_> = checker
        .discoveries()
        .into_iter()
        .filter(|(name, _)| wanted.is_none_or(|wanted| wanted == *name))
        .map(|(name, path)| (name, describe(checker.model(), path.into_vec())))
        .collect();
    violated.sort_unstable();
    Outcome {
        scope: name,
        worlds: checker.unique_state_count(),
        steps: checker.state_count(),
        depth: checker.max_depth(),
        seconds: started.elapsed().as_secs_f64(),
        complete: violated.is_empty() && checker.is_done(),
        violated,
    }
}

/// One line a step, then where it ended.
fn describe(scope: &Scope, path: Vec<(World, Option<Action>)>) -> String {
    let mut lines = Vec::new();
    for (world, action) in path {
        let Some(action) = action else {
            lines.push(format!("  then {:?}", world.engine.data));
            lines.push(format!("  and {:?}", world.sql));
            let trouble = world.is_quiet().then(|| world.trouble_at_rest(scope)).flatten();
            lines.extend(trouble.map(|trouble| format!("  and at rest {trouble}")));
            continue;
        };
        lines.push(match action {
            Action::Step { program } | Action::Begin { program, .. } => {
                let (role, step) = (scope.roles[program], world.programs[program].step);
                let next = world.after(scope, action).map(|next| next.programs[program].step);
                let next = next.map_or(String::new(), |next| format!("{next:?}"));
                format!("  {role:?}: {step:?} -> {next}")
            }
            Action::Lose { program } => {
                let (role, step) = (scope.roles[program], world.programs[program].step);
                format!("  {role:?}: {step:?} is not answered")
            }
            Action::Arrive { late } => format!("  late: {:?}", world.late[late]),
            Action::ReadAhead { program } => {
                format!("  {:?}: reads ahead of its chunk", scope.roles[program])
            }
            Action::Crash { .. } | Action::Flush | Action::Failover { .. } => {
                format!("  {action:?}")
            }
        });
    }
    lines.join("\n")
}
