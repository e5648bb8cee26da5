package endpoint

import (
	"context"
	"log/slog"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	adminv1 "github.com/vipgate/vipgate/pkg/api/admin/v1"
	"github.com/vipgate/vipgate/pkg/identity"
	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/trench/file"
)

// ConfigurationService implements the ConfigurationService.
type ConfigurationService struct {
	adminv1.UnimplementedConfigurationServiceServer
	InForce *latest.Value[trench.Loaded]
	// Confirm puts held removals in force, if the identifier is theirs or "".
	Confirm func(identifier string) (trench.Held, error)
	Log     *slog.Logger
	Audit   Audit
}

// GetConfiguration implements the ConfigurationService.
func (service ConfigurationService) GetConfiguration(context.Context, *adminv1.GetConfigurationRequest) (
	*adminv1.GetConfigurationResponse, error,
) {
	loaded := service.InForce.Load()
	if loaded.Generation == 0 {
		return nil, status.Error(codes.FailedPrecondition, "no configuration is in force yet")
	}
	return &adminv1.GetConfigurationResponse{TrenchFile: string(file.Marshal(loaded.Config))}, nil
}

// ConfirmRemovals implements the ConfigurationService.
func (service ConfigurationService) ConfirmRemovals(ctx context.Context, request *adminv1.ConfirmRemovalsRequest,
) (*adminv1.ConfirmRemovalsResponse, error) {
	held, err := service.Confirm(request.GetId())
	if err != nil {
		return nil, status.Error(codes.FailedPrecondition, err.Error())
	}
	caller := identity.Caller(ctx)
	service.Log.Warn("held removals confirmed by an operator", "id", held.ID, "removals", held.String(), "by", caller)
	service.Audit.record(&adminv1.Event{
		Object: "held removals", To: "confirmed", Detail: held.ID + ": " + held.String(), By: caller,
	})
	return &adminv1.ConfirmRemovalsResponse{Id: held.ID, Removals: held.String()}, nil
}
