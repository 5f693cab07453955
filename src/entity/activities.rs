//! One row per sale.

use sea_orm::entity::prelude::*;

use crate::domain;

/// The words of [`crate::domain::ActivityState`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EnumIter, DeriveActiveEnum)]
#[sea_orm(rs_type = "String", db_type = "String(StringLen::N(32))", rename_all = "snake_case")]
pub enum ActivityState {
    PendingReview,
    Scheduled,
    Active,
    Paused,
    Ended,
    Settled,
}

impl From<domain::ActivityState> for ActivityState {
    fn from(state: domain::ActivityState) -> Self {
        match state {
            domain::ActivityState::PendingReview => Self::PendingReview,
            domain::ActivityState::Scheduled => Self::Scheduled,
            domain::ActivityState::Active => Self::Active,
            domain::ActivityState::Paused => Self::Paused,
            domain::ActivityState::Ended => Self::Ended,
            domain::ActivityState::Settled => Self::Settled,
        }
    }
}

impl From<ActivityState> for domain::ActivityState {
    fn from(state: ActivityState) -> Self {
        match state {
            ActivityState::PendingReview => Self::PendingReview,
            ActivityState::Scheduled => Self::Scheduled,
            ActivityState::Active => Self::Active,
            ActivityState::Paused => Self::Paused,
            ActivityState::Ended => Self::Ended,
            ActivityState::Settled => Self::Settled,
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, DeriveEntityModel)]
#[sea_orm(table_name = "activities")]
pub struct Model {
    #[sea_orm(primary_key, auto_increment = false)]
    pub id: String,
    pub title: String,
    pub state: ActivityState,
    pub start_time: i64,
    pub end_time: i64,
    pub retention_s: i64,
    pub version: i64,
    pub create_time: i64,
    pub update_time: i64,
}

#[derive(Debug, Clone, Copy, EnumIter, DeriveRelation)]
pub enum Relation {}

impl ActiveModelBehavior for ActiveModel {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_words_in_sql_are_those_of_the_domain() {
        for state in domain::ActivityState::ALL {
            let row = ActivityState::from(state);
            assert_eq!(row.to_value(), state.as_str());
            assert_eq!(domain::ActivityState::from(row), state);
        }
    }
}
