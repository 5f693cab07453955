//! Stand-in until the branch with the real one is merged.
use std::sync::Arc;

use crate::{
    domain::{
        ActivityId, ActivityListQuery, ActivitySpec, ActivityView, PipelineStatus, WarmUpReport,
    },
    error::Error,
};

#[derive(Debug, Default)]
pub struct Activities;

impl Activities {
    pub async fn create(self: &Arc<Self>, _: ActivitySpec, _: &str) -> Result<ActivityView, Error> {
        Err(Error::Unimplemented("CreateActivity"))
    }

    pub async fn get(self: &Arc<Self>, _: &ActivityId) -> Result<ActivityView, Error> {
        Err(Error::Unimplemented("GetActivity"))
    }

    pub async fn list(
        self: &Arc<Self>,
        _: ActivityListQuery,
    ) -> Result<(Vec<ActivityView>, String), Error> {
        Err(Error::Unimplemented("ListActivities"))
    }

    pub async fn approve(
        self: &Arc<Self>,
        _: &ActivityId,
        _: &str,
        _: &str,
    ) -> Result<ActivityView, Error> {
        Err(Error::Unimplemented("ApproveActivity"))
    }

    pub async fn end(
        self: &Arc<Self>,
        _: &ActivityId,
        _: &str,
        _: &str,
    ) -> Result<ActivityView, Error> {
        Err(Error::Unimplemented("EndActivity"))
    }

    pub async fn warm_up(self: &Arc<Self>, _: &ActivityId, _: &str) -> Result<WarmUpReport, Error> {
        Err(Error::Unimplemented("Warmup"))
    }

    pub async fn pipeline_status(
        self: &Arc<Self>,
        _: Option<&ActivityId>,
    ) -> Result<PipelineStatus, Error> {
        Err(Error::Unimplemented("GetPipelineStatus"))
    }
}
