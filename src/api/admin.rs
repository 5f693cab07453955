//! The service of operators: parse, act, answer.

use tonic::{Request, Response, Status};

use super::{Services, access::Identity, convert, pb};
use crate::audit;

/// Who calls, for the audit: the name of the token or the certificate. Where callers are not asked
/// it is their address; a name has no space in it, or is a certificate's that the settings list.
pub(super) fn actor<T>(request: &Request<T>) -> String {
    let identity = request.extensions().get::<Identity>();
    match (identity, request.remote_addr()) {
        (Some(identity), _) => identity.name.to_string(),
        (None, Some(address)) => format!("grpc {address}"),
        (None, None) => "grpc".to_owned(),
    }
}

#[tonic::async_trait]
impl pb::seckill_admin_server::SeckillAdmin for Services {
    async fn create_activity(
        &self,
        request: Request<pb::CreateActivityRequest>,
    ) -> Result<Response<pb::CreateActivityResponse>, Status> {
        let actor = actor(&request);
        let spec = convert::activity_spec(request.into_inner())?;
        let activities = self.activities.clone();
        let activity = self.run(async move { activities.create(spec, &actor).await }).await?;
        Ok(Response::new(pb::CreateActivityResponse { activity: Some(activity.into()) }))
    }

    async fn get_activity(
        &self,
        request: Request<pb::GetActivityRequest>,
    ) -> Result<Response<pb::GetActivityResponse>, Status> {
        let id = convert::activity_id(&request.get_ref().activity_id)?;
        let activities = self.activities.clone();
        let activity = self.run(async move { activities.get(&id).await }).await?;
        Ok(Response::new(pb::GetActivityResponse { activity: Some(activity.into()) }))
    }

    async fn list_activities(
        &self,
        request: Request<pb::ListActivitiesRequest>,
    ) -> Result<Response<pb::ListActivitiesResponse>, Status> {
        let query = convert::activity_list(request.into_inner())?;
        let activities = self.activities.clone();
        let (page, next_page_token) = self.run(async move { activities.list(query).await }).await?;
        let activities = page.into_iter().map(Into::into).collect();
        Ok(Response::new(pb::ListActivitiesResponse { activities, next_page_token }))
    }

    async fn approve_activity(
        &self,
        request: Request<pb::ApproveActivityRequest>,
    ) -> Result<Response<pb::ApproveActivityResponse>, Status> {
        let actor = actor(&request);
        let pb::ApproveActivityRequest { activity_id, reason } = request.into_inner();
        let id = convert::activity_move(&activity_id, &reason)?;
        let activities = self.activities.clone();
        let work = async move { activities.approve(&id, &actor, &reason).await };
        let activity = Some(self.run(work).await?.into());
        Ok(Response::new(pb::ApproveActivityResponse { activity }))
    }

    async fn end_activity(
        &self,
        request: Request<pb::EndActivityRequest>,
    ) -> Result<Response<pb::EndActivityResponse>, Status> {
        let actor = actor(&request);
        let pb::EndActivityRequest { activity_id, reason } = request.into_inner();
        let id = convert::activity_move(&activity_id, &reason)?;
        let activities = self.activities.clone();
        let work = async move { activities.end(&id, &actor, &reason).await };
        let activity = Some(self.run(work).await?.into());
        Ok(Response::new(pb::EndActivityResponse { activity }))
    }

    async fn get_pipeline_status(
        &self,
        request: Request<pb::GetPipelineStatusRequest>,
    ) -> Result<Response<pb::GetPipelineStatusResponse>, Status> {
        let id = convert::pipeline_status(request.get_ref())?;
        let activities = self.activities.clone();
        let work = async move { activities.pipeline_status(id.as_ref()).await };
        Ok(Response::new(self.run(work).await?.into()))
    }

    async fn pause_activity(
        &self,
        request: Request<pb::PauseActivityRequest>,
    ) -> Result<Response<pb::PauseActivityResponse>, Status> {
        let actor = actor(&request);
        let pb::PauseActivityRequest { activity_id, reason } = request.into_inner();
        let id = convert::activity_move(&activity_id, &reason)?;
        let activities = self.activities.clone();
        let work = async move { activities.pause(&id, &actor, &reason).await };
        let activity = Some(self.run(work).await?.into());
        Ok(Response::new(pb::PauseActivityResponse { activity }))
    }

    async fn resume_activity(
        &self,
        request: Request<pb::ResumeActivityRequest>,
    ) -> Result<Response<pb::ResumeActivityResponse>, Status> {
        let actor = actor(&request);
        let pb::ResumeActivityRequest { activity_id, reason } = request.into_inner();
        let id = convert::activity_move(&activity_id, &reason)?;
        let activities = self.activities.clone();
        let work = async move { activities.resume(&id, &actor, &reason).await };
        let activity = Some(self.run(work).await?.into());
        Ok(Response::new(pb::ResumeActivityResponse { activity }))
    }

    async fn settle_activity(
        &self,
        request: Request<pb::SettleActivityRequest>,
    ) -> Result<Response<pb::SettleActivityResponse>, Status> {
        let actor = actor(&request);
        let pb::SettleActivityRequest { activity_id, reason } = request.into_inner();
        let id = convert::activity_move(&activity_id, &reason)?;
        let activities = self.activities.clone();
        let work = async move { activities.settle(&id, &actor, &reason).await };
        let activity = Some(self.run(work).await?.into());
        Ok(Response::new(pb::SettleActivityResponse { activity }))
    }

    async fn adjust_stock(
        &self,
        request: Request<pb::AdjustStockRequest>,
    ) -> Result<Response<pb::AdjustStockResponse>, Status> {
        let actor = actor(&request);
        let request = convert::adjust_stock(request.into_inner())?;
        let activities = self.activities.clone();
        let work = async move { activities.adjust(&request, &actor).await };
        Ok(Response::new(self.run(work).await?.into()))
    }

    async fn reconcile(
        &self,
        request: Request<pb::ReconcileRequest>,
    ) -> Result<Response<pb::ReconcileResponse>, Status> {
        let actor = actor(&request);
        let pb::ReconcileRequest { activity_id, repair } = request.into_inner();
        let id = convert::activity_id(&activity_id)?;
        let reconciler = self.reconciler.clone();
        let work = async move { reconciler.reconcile(&id, repair, &actor).await };
        let report = Some(self.run(work).await?.into());
        Ok(Response::new(pb::ReconcileResponse { report }))
    }

    async fn rebuild_stock(
        &self,
        request: Request<pb::RebuildStockRequest>,
    ) -> Result<Response<pb::RebuildStockResponse>, Status> {
        let actor = actor(&request);
        let request = request.into_inner();
        let (id, sku_id, segments) = convert::rebuild_stock(&request)?;
        let (activities, reason) = (self.activities.clone(), request.reason);
        let work = async move {
            activities.rebuild_stock(&id, sku_id.as_ref(), segments, &actor, &reason).await
        };
        let offers = self.run(work).await?.into_iter().map(Into::into).collect();
        Ok(Response::new(pb::RebuildStockResponse { offers }))
    }

    async fn list_dead_letters(
        &self,
        request: Request<pb::ListDeadLettersRequest>,
    ) -> Result<Response<pb::ListDeadLettersResponse>, Status> {
        let pb::ListDeadLettersRequest { page_size, page_token, activity_id } =
            request.into_inner();
        let query = convert::page(page_size, page_token, activity_id.as_deref())?;
        let dead_letters = self.dead_letters.clone();
        let (page, next_page_token) =
            self.run(async move { dead_letters.list(&query).await }).await?;
        let dead_letters = page.into_iter().map(Into::into).collect();
        Ok(Response::new(pb::ListDeadLettersResponse { dead_letters, next_page_token }))
    }

    async fn retry_dead_letter(
        &self,
        request: Request<pb::RetryDeadLetterRequest>,
    ) -> Result<Response<pb::RetryDeadLetterResponse>, Status> {
        let actor = actor(&request);
        let pb::RetryDeadLetterRequest { reservation_id, reason } = request.into_inner();
        let id = convert::dead_letter(&reservation_id, &reason)?;
        let dead_letters = self.dead_letters.clone();
        let work = async move { dead_letters.retry(&id, &actor, &reason).await };
        let reservation = Some(self.run(work).await?.into());
        Ok(Response::new(pb::RetryDeadLetterResponse { reservation }))
    }

    async fn discard_dead_letter(
        &self,
        request: Request<pb::DiscardDeadLetterRequest>,
    ) -> Result<Response<pb::DiscardDeadLetterResponse>, Status> {
        let actor = actor(&request);
        let pb::DiscardDeadLetterRequest { reservation_id, reason } = request.into_inner();
        let id = convert::dead_letter(&reservation_id, &reason)?;
        let dead_letters = self.dead_letters.clone();
        let work = async move { dead_letters.discard(&id, &actor, &reason).await };
        let reservation = Some(self.run(work).await?.into());
        Ok(Response::new(pb::DiscardDeadLetterResponse { reservation }))
    }

    async fn list_audit(
        &self,
        request: Request<pb::ListAuditRequest>,
    ) -> Result<Response<pb::ListAuditResponse>, Status> {
        let pb::ListAuditRequest { page_size, page_token, activity_id } = request.into_inner();
        let query = convert::page(page_size, page_token, activity_id.as_deref())?;
        let database = self.activities.database.clone();
        let work = async move { audit::list(&database, &query).await };
        let (page, next_page_token) = self.run(work).await?;
        let entries = page.into_iter().map(Into::into).collect();
        Ok(Response::new(pb::ListAuditResponse { entries, next_page_token }))
    }
}
